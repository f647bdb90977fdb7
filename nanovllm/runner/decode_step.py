"""The self-advancing decode step: each row's newest token in, its next one out, all on the device.

Nothing of it comes from the host but who takes part, so an unchanged batch needs no copy, and for each of a few sizes
the whole of it, from embedding to sampled token, is one recorded graph.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend
from nanovllm.kernels.select import compiled_sizes, graph_sizes
from nanovllm.layers.step import Sequences, Step
from nanovllm.runner.graphs import Graphs
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.sampling import KernelSampler
from nanovllm.runner.stage import Stage


class Ending(Enum):
    """How a step ends."""

    TOKENS = auto()
    CUT_TOKENS = auto()  # some row draws from a part of the vocabulary
    LOGITS = auto()  # sampling has more to do than the graph knows


@dataclass(frozen=True)
class Decoding:
    """Who decodes, in the order the device has them: longest first, so that no long one starts last."""

    planned: tuple[int, ...]  # the rows as the plan has them
    rows: tuple[int, ...]
    order: np.ndarray  # [rows] where each of `rows` stands in `planned`

    @classmethod
    def of(cls, planned: tuple[int, ...], lengths: np.ndarray) -> "Decoding":
        rows = np.array(planned, dtype=np.int64)
        order = np.argsort(-lengths[rows], kind="stable")
        return cls(planned, tuple(rows[order].tolist()), order)


@dataclass(frozen=True)
class StepKind:
    """What a recorded graph is for."""

    size: int  # rows, padding included
    ending: Ending
    stream_k: bool  # lengths are so unequal that sequences share programs in attention


class DecodeStep:
    def __init__(
        self,
        stage: Stage,
        backend: AttentionBackend,
        table: RequestTable,
        sampler: KernelSampler,
        *,
        max_num_seqs: int,
        device: torch.device,
        eager: bool,
        keeps_row_state: bool = False,
    ) -> None:
        """`keeps_row_state`: a layer of the model does."""
        self._stage, self._backend, self._table, self._sampler = stage, backend, table, sampler
        self._positions = torch.empty(max_num_seqs, dtype=torch.int32, device=device)
        self._sizes = graph_sizes(max_num_seqs)
        self._numbers: Tensor | None = None  # [max_num_seqs] 0, 1, 2, ..., for layers with a state per row
        if keeps_row_state:
            self._numbers = torch.arange(max_num_seqs, dtype=torch.int32, device=device)
        self._graphs = None if eager else Graphs(device)

    def size_for(self, num_rows: int) -> int:
        return self._sizes[bisect_left(self._sizes, num_rows)] if num_rows <= self._sizes[-1] else num_rows

    def run(self, kind: StepKind, states: list[Any]) -> Tensor | None:
        """[size] tokens or [size, vocab] logits, valid until the next run; None for logits of another rank."""
        if self._graphs is None:
            return self._step(kind, states)
        if kind not in self._graphs:
            self._record(kind, states)
        return self._graphs.replay(kind)

    def compile(self, states: list[Any]) -> None:
        """Launch what the first answers will need: a step for each class of sizes that has kernels of its own."""
        for size in sorted({self.size_for(min(rows, self._sizes[-1])) for rows in compiled_sizes()}):
            self._step(StepKind(size, Ending.TOKENS, stream_k=False), states)

    def _record(self, kind: StepKind, states: list[Any]) -> None:
        """With padding rows alone, which change nothing, once to have everything compiled and once to record it."""
        assert self._graphs is not None
        rows = self._table.decode_rows.clone()
        self._table.decode_rows.zero_()
        self._step(kind, states)
        self._graphs.record(kind, partial(self._step, kind, states))
        self._table.decode_rows.copy_(rows)

    def _step(self, kind: StepKind, states: list[Any]) -> Tensor | None:
        table = self._table
        rows, positions = table.decode_rows[: kind.size], self._positions[: kind.size]
        # in this order: once the embedding is under way, layers may read ahead what `decode_step` has laid out
        attention = self._backend.decode_step(
            rows, positions, blocks=table.blocks, lengths=table.length, stream_k=kind.stream_k
        )
        sequences = None
        if self._numbers is not None:
            numbers = self._numbers[: kind.size]
            sequences = Sequences(rows=rows, starts=positions, first_tokens=numbers, num_new=torch.ones_like(numbers))
        step = Step(attention, sequences)
        x = self._stage.newest_inputs(table, rows, positions)
        logits = self._stage.logits(self._stage.forward(x, states, step))
        if kind.ending is Ending.LOGITS:
            return logits
        if logits is None:
            return self._stage.hear_tokens(table, rows)
        tokens = self._sampler.launch(logits, rows, cuts=kind.ending is Ending.CUT_TOKENS)
        self._stage.tell_tokens(tokens)
        return tokens

    def close(self) -> None:
        if self._graphs is not None:
            self._graphs.close()
