"""The arrays that a step sends from the host to the device, in one copy."""

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 4  # integers: Triton compiles a kernel again for a pointer that is not a multiple of 16 bytes
MOST_ARRAYS = 16  # of a step


class Upload:
    """Collects integer arrays in one pinned buffer. `add` returns the view of the device buffer that the array fills
    when the step is sent.

    One device buffer serves all steps: the copy runs after the kernels that still read the step before.
    """

    def __init__(self, *, capacity: int, device: torch.device) -> None:
        self._capacity = capacity  # integers of a step
        self.device = device
        self._on_device = torch.empty(capacity, dtype=torch.int32, device=device)
        self._host = torch.empty(0, dtype=torch.int32)
        self._used = 0

    def start(self, *, extra: int) -> None:
        """Begin a step; `extra` is the number of integers that it adds beyond `capacity`."""
        size = self._capacity + extra + MOST_ARRAYS * ALIGNMENT
        if self._on_device.numel() < size:
            self._on_device = torch.empty(size, dtype=torch.int32, device=self.device)
        # a new buffer from torch's pool of pinned memory: the last one may still be being copied
        self._host = torch.empty(size, dtype=torch.int32, pin_memory=self.device.type == "cuda")
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
