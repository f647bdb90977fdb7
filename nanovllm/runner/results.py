"""The result of a step: copied to the host while the next step runs, read when `wait` is called."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import StepResult, TokenLogprobs

if TYPE_CHECKING:
    from nanovllm.runner.logprobs import PendingScores, RowScores


def to_host(tensor: Tensor) -> Tensor:
    """Queue a copy into pinned memory; valid once an event recorded after it has passed."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class PendingStep:
    """A launched step; `wait` returns its tokens."""

    def __init__(
        self,
        tokens: Tensor | None,  # [num_sampled], all that a row has sampled next to each other
        logprobs: "RowScores | None",
        prompt_logprobs: "dict[int, list[PendingScores]]",  # by row of the request table
        device: torch.device,
        *,
        order: np.ndarray | None = None,  # [num_sampled] index of each token in the plan; None = in order
        proposed: Sequence[tuple[int, ...]] | None = None,  # by sampled row; None = nothing was proposed
        pooled: Mapping[int, Tensor] | None = None,  # by row of the request table
    ) -> None:
        self._tokens = None if tokens is None else to_host(tokens)
        self._logprobs = None if logprobs is None else logprobs.map(to_host)
        self._prompt_logprobs = {row: [part.map(to_host) for part in parts] for row, parts in prompt_logprobs.items()}
        self._order = order
        self._proposed = proposed
        self._pooled = {row: to_host(vector) for row, vector in (pooled or {}).items()}
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        raise AssertionError("a step without guided rows has sampled already")

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        prompt_logprobs = {
            row: [entry for part in parts for entry in part.read()] for row, parts in self._prompt_logprobs.items()
        }
        tokens, logprobs = self._read_tokens(), self._read_logprobs()
        if self._proposed is not None:
            tokens, logprobs = _kept([token for (token,) in tokens], logprobs, self._proposed)
        pooled = {row: vector.tolist() for row, vector in self._pooled.items()}
        return StepResult(tokens=tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, pooled=pooled)

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


def _kept(
    sampled: list[int], logprobs: dict[int, list[TokenLogprobs]], proposed: Sequence[tuple[int, ...]]
) -> tuple[list[list[int]], dict[int, list[TokenLogprobs]]]:
    """By row, the sampled tokens up to the first one that differs from the proposed one, and their logprobs.

    `sampled` and the keys of `logprobs` count sampled positions: one more than proposed tokens in each row.
    """
    tokens: list[list[int]] = []
    kept_logprobs: dict[int, list[TokenLogprobs]] = {}
    begin = 0
    for index, guesses in enumerate(proposed):
        own = sampled[begin : begin + len(guesses) + 1]
        count = 1 + next((i for i, guess in enumerate(guesses) if own[i] != guess), len(guesses))
        tokens.append(own[:count])
        if begin in logprobs:
            kept_logprobs[index] = [entry for at in range(begin, begin + count) for entry in logprobs[at]]
        begin += len(own)
    return tokens, kept_logprobs


class GuidedStep:
    """A launched step that samples when the masks of its guided rows are known."""

    def __init__(self, finish: Callable[[Mapping[int, Sequence[bytes]]], PendingStep]) -> None:
        self._finish = finish
        self._finished: PendingStep | None = None

    @torch.inference_mode()
    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        self._finished = self._finish(masks)

    def wait(self) -> StepResult:
        assert self._finished is not None, "a guided step needs its masks"
        return self._finished.wait()
