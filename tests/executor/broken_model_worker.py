"""A worker whose model raises an error in a later step, on rank 1 only."""

from typing import Any

from nanovllm.executor.messages import Start
from nanovllm.executor.worker import RealModel, Runner, run
from nanovllm.models.decoder import Decoder

NUM_GOOD_STEPS = 6


class BreakingModel(RealModel):
    def build(self, start: Start, store: Any) -> Runner:
        runner = super().build(start, store)
        if start.rank.index == 1:
            _break_later()
        return runner


def _break_later() -> None:
    forward, calls = Decoder.__call__, iter(range(NUM_GOOD_STEPS))

    def breaking(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        if next(calls, None) is None:
            raise ZeroDivisionError("the layers are out of order")
        return forward(self, *args, **kwargs)

    Decoder.__call__ = breaking  # type: ignore[method-assign]


if __name__ == "__main__":
    run(BreakingModel())
