"""What the host tells the device in a step, in one copy."""

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4  # integers: Triton compiles a kernel anew for a pointer that is no multiple of 16 bytes
MOST_ARRAYS = 16  # of a step


class Upload:
    """Integer arrays are written side by side into one pinned buffer; each is handed out at once as the view of the
    device's buffer that it will fill when the step is sent.

    One device buffer serves all steps: a copy queues behind the kernels that still read the step before.
    """

    def __init__(self, *, capacity: int, device: torch.device) -> None:
        self._capacity = capacity  # of a step's own arrays
        self._device = device
        self._on_device = torch.empty(capacity, dtype=torch.int32, device=device)
        self._host = torch.empty(0, dtype=torch.int32)
        self._used = 0

    def start(self, *, extra: int) -> None:
        """Begin a step; `extra` is how much it will add beyond its own arrays."""
        size = self._capacity + extra + MOST_ARRAYS * ALIGNMENT
        if self._on_device.numel() < size:
            self._on_device = torch.empty(size, dtype=torch.int32, device=self._device)
        # a fresh buffer from torch's pool of pinned memory: the last one may still be on its way
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._used = 0

    def add(self, values: np.ndarray) -> Tensor:
        begin = -(-self._used // ALIGNMENT) * ALIGNMENT
        self._used = begin + values.size
        assert self._used <= self._host.numel(), "a step is larger than was planned for"
        self._host.numpy()[begin : self._used] = values.reshape(-1)
        return self._on_device[begin : self._used].view(values.shape)

    def send(self) -> None:
        if self._used:
            self._on_device[: self._used].copy_(self._host[: self._used], non_blocking=True)
