"""Where a plan goes: the one interface between the control plane and whatever runs the model."""

from collections.abc import Mapping
from typing import Protocol

from nanovllm.plan import StepPlan, StepResult


class StepHandle(Protocol):
    """A step under way."""

    def sample(self, masks: Mapping[int, bytes]) -> None:
        """For a plan with guided rows, and before the next launch: what each of them may sample, a bit a token, low
        bits first. A guided row without a mask has ended; its token will be dropped."""
        ...

    def wait(self) -> StepResult:
        """Block until the step has run. Handles are waited for in the order of their launch."""
        ...


class Executor(Protocol):
    num_blocks: int  # of the KV cache
    runs_beside_host: bool  # a launched step leaves the host free, so scheduling ahead pays
    startup_seconds: dict[str, float]  # how long the parts of its start took

    def launch(self, plan: StepPlan) -> StepHandle:
        """Queue a step behind those launched before it."""
        ...

    def embed(self, token_ids: list[int], block_tables: list[list[int]], pooling: str) -> list[float]:
        """The pooled hidden state of a text, computed in blocks that the caller lends."""
        ...

    def check(self) -> None:
        """EngineError if it cannot go on, also if that was not noticed yet because nothing was asked."""
        ...

    def close(self) -> None:
        """Give back the device's memory and any processes."""
        ...
