"""The interface between the control plane and what runs the model."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from nanovllm.plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A step that was launched."""

    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        """Sample, with these masks; called once for a plan with guided rows, before the next launch.

        `masks` has the tokens that each guided row may sample: a mask for each sampled position, one bit per token, low
        bits first. A guided row without a mask has ended, and its token will be dropped.
        """
        ...

    def wait(self) -> StepResult:
        """Block until the step has run. Handles are waited for in the order of their launch."""
        ...


class Executor(Protocol):
    num_blocks: int  # of the KV cache
    runs_beside_host: bool  # a launched step leaves the host free to schedule the next one
    startup_seconds: dict[str, float]  # seconds of each phase of the start

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue a step; steps run in the order of their launch."""
        ...

    def idle_work(self) -> Iterator[None]:
        """Pieces of work that steps would have to do later, for a caller that has nothing else to do."""
        ...

    def check(self) -> None:
        """Raise EngineError if it cannot go on, also if it failed between steps."""
        ...

    def close(self) -> None:
        """Free the device's memory and end all worker processes."""
        ...
