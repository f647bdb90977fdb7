"""What a step gives back: copied to the host while the next step already runs, read when somebody waits for it."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import StepResult, TokenLogprobs
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
        order: np.ndarray | None = None,  # [num_sampled] where each token stands in the plan; None = in order
    ) -> None:
        self._tokens = None if tokens is None else to_host(tokens)
        self._logprobs = None if logprobs is None else logprobs.map(to_host)
        self._prompt_logprobs = {row: [part.map(to_host) for part in parts] for row, parts in prompt_logprobs.items()}
        self._order = order
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def sample(self, masks: Mapping[int, bytes]) -> None:
        raise AssertionError("a step without guided rows has sampled already")

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        return StepResult(
            tokens=self._read_tokens(),
            logprobs=self._read_logprobs(),
            prompt_logprobs={
                row: [entry for part in parts for entry in part.read()] for row, parts in self._prompt_logprobs.items()
            },
        )

    def _read_tokens(self) -> list[list[int]]:
        if self._tokens is None:
            return []
        tokens = self._tokens.numpy()
        if self._order is not None:
            planned = np.empty_like(tokens)
            planned[self._order] = tokens
            tokens = planned
        return tokens[:, None].tolist()

    def _read_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        if self._logprobs is None:
            return {}
        found = self._logprobs.read()
        return found if self._order is None else {int(self._order[index]): scores for index, scores in found.items()}


class GuidedStep:
    """A launched step that cannot sample before it is told what its guided rows may say."""

    def __init__(self, finish: Callable[[Mapping[int, bytes]], PendingStep]) -> None:
        self._finish = finish
        self._finished: PendingStep | None = None

    @torch.inference_mode()
    def sample(self, masks: Mapping[int, bytes]) -> None:
        self._finished = self._finish(masks)

    def wait(self) -> StepResult:
        assert self._finished is not None, "a guided step must be told its masks"
        return self._finished.wait()
