"""Steps with prompts as CUDA graphs, because launching their kernels takes the host as long as the GPU needs for them.

A decode step depends on the host only by its size, a step with prompts also by how its tokens are divided among
sequences. Here all of that is data: arrays on the device, at fixed addresses and padded to fixed sizes. So the graph of
a number of tokens serves every step with at most as many. The last layer computes only tokens that are sampled from,
whose number varies; it is launched as usual.

Graphs are recorded while the engine is idle. A step whose graph is not there yet is launched kernel by kernel.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nanovllm.attention.backend import BatchGeometry
from nanovllm.attention.triton import TritonBackend, TritonStep, padded
from nanovllm.kernels.launch import cdiv
from nanovllm.layers.step import Step
from nanovllm.plan import StepPlan
from nanovllm.runner.forward_batch import ForwardBatch
from nanovllm.runner.graphs import Graphs
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.stage import Stage
from nanovllm.runner.upload import Upload

MULTIPLE = 128  # of tokens: products of so many have tiles of as many rows anyway
MOST_TOKENS = 2560  # larger steps take the GPU longer than the host
MOST_DECODES, MOST_CHUNKS = 512, 24  # with more, programs that only find padding would take time
LONGEST = 4096  # tokens; longer sequences have kernels of their own, or are divided among more programs


@dataclass(frozen=True)
class PaddedStep:
    rows: Tensor  # [size] of the request table, of each token; padding: row 0
    positions: Tensor  # [size]
    attention: TritonStep


class PromptGraphs:
    def __init__(
        self,
        stage: Stage,
        backend: TritonBackend,
        table: RequestTable,
        graphs: Graphs,
        *,
        max_num_seqs: int,
        max_num_tokens: int,
        device: torch.device,
    ) -> None:
        self._stage, self._backend, self._table, self._graphs = stage, backend, table, graphs
        self._max_num_decodes = min(MOST_DECODES, max_num_seqs)
        self.sizes = list(range(MULTIPLE, min(MOST_TOKENS, max_num_tokens) + 1, MULTIPLE))
        self._upload = Upload(capacity=8 * MOST_TOKENS + 8 * MOST_CHUNKS, device=device)

    @property
    def is_recorded(self) -> bool:
        """Whether all sizes have a graph."""
        return all(self._key(size) in self._graphs for size in self.sizes)

    def size_for(self, plan: StepPlan) -> int | None:
        """The size of the recorded graph that serves this step with prompts, if there is one."""
        steps = plan.row_steps
        size = cdiv(len(plan.decode_rows) + sum(step.num_new for step in steps), MULTIPLE) * MULTIPLE
        if self._key(size) not in self._graphs or len(steps) > MOST_CHUNKS or len(plan.decode_rows) > MOST_DECODES:
            return None
        if any(step.proposed or step.pooling or step.num_prompt_logprobs is not None for step in steps):
            return None
        longest = max(step.start + step.num_new for step in steps)
        if plan.decode_rows:
            longest = max(longest, int(self._table.host_length[list(plan.decode_rows)].max()))
        return size if longest <= LONGEST else None

    def prepare(self, size: int, geometry: BatchGeometry, _: object = None) -> PaddedStep:
        """Send the arrays of a step. Their order and sizes, and so their addresses, depend on `size` alone."""
        upload = self._upload
        upload.start(extra=0)
        rows = upload.add(padded(geometry.rows[geometry.token_seqs], size, 0))
        positions = upload.add(padded(geometry.positions, size, 0))
        num_decodes = min(size, self._max_num_decodes)
        attention = self._backend.prepare_padded(
            geometry, upload.add, rows=rows, num_decodes=num_decodes, num_chunks=MOST_CHUNKS
        )
        upload.send()
        return PaddedStep(rows, positions, attention)

    def has_prepared(self, batch: ForwardBatch) -> bool:
        return isinstance(batch.step.attention, PaddedStep)

    def forward(self, batch: ForwardBatch, states: list[Any], wanted: Tensor | None) -> Tensor:
        """The hidden states of the `wanted` tokens, [n] indices, or of all of them, for a batch of `prepare`."""
        padded_step: PaddedStep = batch.step.attention
        x = self._graphs.replay(self._key(len(padded_step.rows)))
        step = Step(padded_step.attention, positions=padded_step.positions)
        hidden = self._stage.model(x, states, step, wanted, slice(-1, None))
        return hidden[: len(batch.rows)]  # without padding, if all are wanted

    def recordings(self, states: list[Any]) -> Iterator[None]:
        """Record the graph of each size that has none yet, one at a time, the largest first."""
        for size in reversed(self.sizes):
            if (key := self._key(size)) not in self._graphs:
                step = self.prepare(size, nothing(self._table))
                self._all_but_last(step, states)  # kernels are compiled and loaded here
                self._graphs.record(key, partial(self._all_but_last, step, states))
                yield

    def _all_but_last(self, step: PaddedStep, states: list[Any]) -> Tensor:
        """The input of the last layer, [size, hidden]."""
        x = self._stage.inputs(self._table.tokens, step.rows, step.positions)
        return self._stage.model(x, states, Step(step.attention, positions=step.positions), None, slice(0, -1))

    def _key(self, size: int) -> tuple[str, int]:
        return "prompts", size


def nothing(table: RequestTable) -> BatchGeometry:
    """A step without sequences."""
    none = np.zeros(0, dtype=np.int64)
    tokens = torch.empty(0, dtype=torch.int32, device=table.length.device)
    return BatchGeometry(
        num_decodes=0,
        rows=none,
        starts=none,
        num_new=none,
        num_sampled=none,
        first_tokens=none,
        token_seqs=none,
        positions=none,
        block_tables={},
        device_rows=tokens,
        device_positions=tokens,
        device_blocks=table.blocks,
    )
