"""A step with rows that a grammar limits: it samples when their masks are known."""

from collections.abc import Callable, Mapping, Sequence

import torch

from nanovllm.plan import StepResult
from nanovllm.runner.results import PendingStep


class GuidedStep:
    """A launched step that has not sampled yet. `finish` samples, given the masks of the guided rows."""

    def __init__(self, finish: Callable[[Mapping[int, Sequence[bytes]]], PendingStep]) -> None:
        self._finish = finish
        self._finished: PendingStep | None = None

    @torch.inference_mode()
    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        self._finished = self._finish(masks)

    def wait(self) -> StepResult:
        assert self._finished is not None, "a guided step needs its masks"
        return self._finished.wait()
