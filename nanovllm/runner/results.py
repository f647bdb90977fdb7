"""What a step gives back: copied to the host while the next step already runs, read when somebody waits for it."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.plan import StepResult
from nanovllm.runner.logprobs import PendingScores, RowScores


def to_host(tensor: Tensor) -> Tensor:
    """Queue a copy into pinned memory; valid once an event recorded behind it has passed."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class PendingStep:
    """A launched step; `wait` brings its tokens to the host."""

    def __init__(
        self,
        tokens: Tensor | None,  # [num_sampled]
        logprobs: RowScores | None,
        prompt_logprobs: dict[int, list[PendingScores]],  # by row of the request table
        device: torch.device,
    ) -> None:
        self._tokens = None if tokens is None else to_host(tokens)
        self._logprobs = None if logprobs is None else logprobs.map(to_host)
        self._prompt_logprobs = {row: [part.map(to_host) for part in parts] for row, parts in prompt_logprobs.items()}
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        return StepResult(
            tokens=[] if self._tokens is None else self._tokens[:, None].tolist(),
            logprobs={} if self._logprobs is None else self._logprobs.read(),
            prompt_logprobs={
                row: [entry for part in parts for entry in part.read()] for row, parts in self._prompt_logprobs.items()
            },
        )
