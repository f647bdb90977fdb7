"""The decode step: it reads each row's newest token and appends the next one, all on the device.

The host only says which rows take part, so an unchanged batch needs no copy. For each of a few batch sizes the whole
step, from embedding to sampled token, is one recorded CUDA graph.
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.interface import DeviceBackend, Lengths
from nanovllm.kernels.select import compiled_sizes, graph_sizes
from nanovllm.layers.sequences import Sequences
from nanovllm.layers.step import Step
from nanovllm.plan import StepPlan
from nanovllm.runner.graphs import Graphs
from nanovllm.runner.guided_step import GuidedStep
from nanovllm.runner.kernel_sampler import KernelSampler
from nanovllm.runner.kernel_table import KernelTable
from nanovllm.runner.results import PendingStep
from nanovllm.runner.sampling import Sampling
from nanovllm.runner.sorted_step import SortedStep
from nanovllm.runner.stage import Stage


class Ending(Enum):
    """How a step ends."""

    TOKENS = auto()
    CUT_TOKENS = auto()  # some row has top-k, top-p or min-p
    LOGITS = auto()  # some row needs logits processors, masks or logprobs, which run outside the graph


@dataclass(frozen=True)
class Decoding:
    """The rows that decode, in the order of the device: longest first, so that no long one starts last."""

    planned: tuple[int, ...]  # the rows as the plan has them
    rows: tuple[int, ...]
    order: np.ndarray  # [rows] index in `planned` of each of `rows`

    @classmethod
    def of(cls, planned: tuple[int, ...], lengths: np.ndarray) -> "Decoding":
        rows = np.array(planned, dtype=np.int64)
        order = np.argsort(-lengths[rows], kind="stable")
        return cls(planned, tuple(rows[order].tolist()), order)


@dataclass(frozen=True)
class StepKind:
    """Identifies a recorded graph."""

    size: int  # rows, padding included
    ending: Ending
    lengths: Lengths = Lengths.SIMILAR


class DecodeStep:
    def __init__(
        self,
        stage: Stage,
        backend: DeviceBackend,
        table: KernelTable,
        sampler: KernelSampler,
        sampling: Sampling,
        *,
        max_num_seqs: int,
        device: torch.device,
        eager: bool,
        keeps_row_state: bool = False,
    ) -> None:
        """`sampler` is part of recorded steps, `sampling` serves those that end with logits. `keeps_row_state`: a layer
        of the model does."""
        self._device, self._sampling = device, sampling
        self._decoding = Decoding.of((), table.host_length)
        self._stage, self._backend, self._table, self._sampler = stage, backend, table, sampler
        # zeros: steps of `compile` run without the kernel that writes positions, and torch may index by them
        self._positions = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._sizes = graph_sizes(max_num_seqs)
        self._numbers: Tensor | None = None  # [max_num_seqs] 0, 1, 2, ..., for layers with a state per row
        if keeps_row_state:
            self._numbers = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self.graphs = None if eager else Graphs(device)

    def size_for(self, num_rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_rows)] if num_rows <= self._sizes[-1] else num_rows

    def launch(self, plan: StepPlan, states: list[Any]) -> PendingStep | GuidedStep:
        """Launch a plan that has only decode rows."""
        n, table = len(plan.decode_rows), self._table
        size = self.size_for(n)
        if plan.decode_rows is not self._decoding.planned:
            self._decoding = Decoding.of(plan.decode_rows, table.host_length)
            table.set_decode_rows(self._decoding.rows, size=size)
        if table.has_changes:
            table.send(lambda upload: None)
        sampling = self._sampling.batch_of(self._decoding.rows)
        ending = Ending.LOGITS
        if sampling.plain and not plan.guided_rows:
            ending = Ending.CUT_TOKENS if sampling.cuts else Ending.TOKENS
        lengths = Lengths.of(table.host_length[sampling.host_rows])
        ran = self.run(StepKind(size, ending, lengths), states)
        drawn_or_logits = None if ran is None else ran[:n]
        order = self._decoding.order

        def finish(masks: Mapping[int, Sequence[bytes]]) -> PendingStep:
            tokens, scores = drawn_or_logits, None
            if ending is Ending.LOGITS:
                tokens, scores = self._sampling.draw(tokens, sampling, table.decode_rows[:n], masks)
            table.advance(sampling.host_rows)
            return SortedStep(tokens, scores, self._device, order)

        return GuidedStep(finish) if plan.guided_rows else finish({})

    def reset(self) -> None:
        """Forget the rows of the last step: the table was cleared."""
        self._decoding = Decoding.of((), self._table.host_length)

    def run(self, kind: StepKind, states: list[Any]) -> Tensor | None:
        """Run a step; returns [size] tokens or [size, vocab] logits, valid until the next run.

        None if the step ends with logits, which another rank has.
        """
        if self.graphs is None:
            return self._step(kind, states)
        if kind not in self.graphs:
            self._record(kind, states)
        return self.graphs.replay(kind)

    def compile(self, states: list[Any]) -> None:
        """Launch one step for each class of sizes that has its own kernels, to compile them."""
        sizes = sorted({self.size_for(min(rows, self._sizes[-1])) for rows in compiled_sizes()})
        kinds = [StepKind(size, Ending.TOKENS) for size in sizes]
        kinds += [StepKind(size, Ending.CUT_TOKENS) for size in (sizes[0], sizes[-1])]
        for kind in kinds:
            self._step(kind, states)

    def recordings(self, states: list[Any]) -> Iterator[None]:
        """Record the graph of each size that has none yet, one at a time. The largest first: smaller ones then reuse
        its memory, while each larger one would take more."""
        if self.graphs is None:
            return
        for ending in (Ending.TOKENS, Ending.CUT_TOKENS):
            for size in reversed(self._sizes):
                if (kind := StepKind(size, ending)) not in self.graphs:
                    self._record(kind, states)
                    yield

    def _record(self, kind: StepKind, states: list[Any]) -> None:
        """Record a graph. The step runs with padding rows, which change nothing: once to compile, once to record."""
        assert self.graphs is not None
        rows = self._table.decode_rows.clone()
        self._table.decode_rows.zero_()
        self._step(kind, states)
        self.graphs.record(kind, partial(self._step, kind, states))
        self._table.decode_rows.copy_(rows)

    def _step(self, kind: StepKind, states: list[Any]) -> Tensor | None:
        table = self._table
        rows, positions = table.decode_rows[: kind.size], self._positions[: kind.size]
        # in this order: once the embedding runs, layers may read what `decode_step` has prepared
        attention = self._backend.decode_step(
            rows, positions, blocks=table.blocks, lengths=table.length, kind=kind.lengths
        )
        sequences = None
        if self._numbers is not None:
            numbers = self._numbers[: kind.size]
            sequences = Sequences(rows, positions, numbers, num_new=torch.ones_like(numbers), token_seqs=numbers)
        step = Step(attention, sequences, positions)
        x = self._inputs(rows, positions)
        logits = self._stage.logits(self._stage.forward(x, states, step))
        if kind.ending is Ending.LOGITS:
            return logits
        if logits is None:
            return self._stage.receive_tokens(table, rows)
        tokens = self._sampler.launch(logits, rows, cuts=kind.ending is Ending.CUT_TOKENS)
        self._stage.broadcast_tokens(tokens)
        return tokens

    def _inputs(self, rows: Tensor, positions: Tensor) -> Tensor:
        """The input of the layers for each row's newest token; writes its position to `positions`, [num_rows]."""
        table, kernels = self._table, self._stage.kernels
        if kernels is not None:
            return kernels.of_newest(table.tokens, table.length, rows, positions)
        torch.sub(table.length[rows], 1, out=positions)
        return self._stage.inputs(table.tokens, rows, positions)  # padding, at -1, reads the last token of row 0: 0

    def close(self) -> None:
        if self.graphs is not None:
            self.graphs.close()
