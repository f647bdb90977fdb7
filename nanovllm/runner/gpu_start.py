"""The start on a GPU: compiles kernels while weights are loaded, and measures the memory of the largest steps."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nanovllm.config import Config
from nanovllm.kernels.compile_ahead import compile_ahead
from nanovllm.layers.context import BuildContext
from nanovllm.plan import StepPlan
from nanovllm.runner.phases import Phases
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.warm_up import largest_steps, peak_memory, score_everything

if TYPE_CHECKING:  # imports Triton, which may not be installed
    from nanovllm.runner.decode_step import DecodeStep


class GpuStart:
    """`launch` launches a step of the runner. `small_cache` gives the runner a new cache of one block per group, which
    is enough for these steps, and returns it."""

    def __init__(
        self,
        config: Config,
        context: BuildContext,
        *,
        table: RequestTable,
        phases: Phases,
        decode: "DecodeStep | None",
        launch: Callable[[StepPlan], Any],
        small_cache: Callable[[], list[Any]],
    ) -> None:
        self._context, self._table, self._phases = context, table, phases
        self._decode, self._launch, self._small_cache = decode, launch, small_cache
        self._max_num_seqs = config.max_num_seqs
        self._steps = largest_steps(
            max_num_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=table.tokens.shape[1],
        )

    @contextmanager
    def kernels_compiled(self, *, num_ranks: int) -> Iterator[None]:
        """Compile kernels in the background while the body runs: those of the largest steps and of decode steps."""
        if not self._context.kernels:
            yield
            return
        states = self._small_cache()

        def launches() -> None:
            with self._phases.timed("launches"):
                for step in self._steps:
                    self._launch(step)
                if self._decode is not None:
                    self._decode.compile(states)

        with compile_ahead(launches, num_local_processes=num_ranks) as wait:
            self._table.clear()
            yield
            with self._phases.timed("kernels"):
                wait()

    def activation_bytes(self, *, vocab_size: int) -> int:
        """Run the largest possible steps; returns the bytes that their activations take."""
        self._small_cache()
        device, dtype = self._context.device, self._context.dtype
        taken = max(
            peak_memory(lambda: [self._launch(step).wait() for step in self._steps], device),
            peak_memory(lambda: score_everything(self._max_num_seqs, vocab_size, dtype, device), device),
        )
        self._table.clear()
        if self._decode is not None:
            self._decode.reset()
        return taken
