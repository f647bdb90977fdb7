"""The running requests as the device sees them: each has a fixed row; row 0 is padding."""

import math
import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import NewBlocks, NewRow, StepPlan
from nanovllm.runner.upload import Upload

if TYPE_CHECKING:
    from nanovllm.runner.verification import Verification

Built = TypeVar("Built")


def int32_array(values: tuple[int, ...]) -> np.ndarray:
    """The same as np.array, in half the time for the tokens of a prompt."""
    return np.frombuffer(struct.pack(f"{len(values)}i", *values), dtype=np.int32)


class RequestTable:
    """Tokens, lengths and block tables of all rows; `KernelTable` adds what our kernels read.

    The values of tokens are on the device only. Lengths and block tables do not depend on them and are kept on the host
    too. All columns on the device are views of one int32 tensor, so the changes of a step are a list of (index, value).
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_model_len: int,
        block_size: int,
        upload: Upload,
        windows: tuple[int | None, ...] = (None,),  # of the paged groups
        columns: tuple[str, ...] = (),  # more numbers of each row
    ) -> None:
        rows, max_blocks = max_num_seqs + 1, -(-max_model_len // block_size)
        self.block_size = block_size
        self._groups = tuple(f"blocks of group {group}" for group in range(len(windows)))
        # decode_rows are for KernelTable; they lie here so that the addresses of what follows are multiples of 16 bytes
        shapes: dict[str, tuple[int, ...]] = {"tokens": (rows, max_model_len), "decode_rows": (max_num_seqs,)}
        shapes |= {name: (rows, max_blocks) for name in self._groups}
        shapes |= {name: (rows,) for name in ("length", *columns)}
        sizes = [math.prod(shape) for shape in shapes.values()]
        self._starts = dict(zip(shapes, np.cumsum([0, *sizes[:-1]]).tolist(), strict=True))
        self._widths = {name: shape[-1] if len(shape) == 2 else 1 for name, shape in shapes.items()}
        self._all = torch.zeros(sum(sizes), dtype=torch.int32, device=upload.device)
        self._views = views = {
            name: part.view(shape) for (name, shape), part in zip(shapes.items(), self._all.split(sizes), strict=True)
        }
        self.tokens = views["tokens"]  # [rows, max_model_len]
        # by the window of their group: [rows, max_blocks] each
        self.blocks = {window: views[name] for window, name in zip(windows, self._groups, strict=True)}
        self.length = views["length"]  # [rows] number of known tokens

        self.host_length = np.zeros(rows, dtype=np.int64)
        self.host_blocks = {window: np.zeros((rows, max_blocks), dtype=np.int64) for window in windows}
        self._host_groups = tuple(self.host_blocks.values())  # the same arrays by group
        self.num_prompt_tokens = np.zeros(rows, dtype=np.int64)
        self._requests: list[NewRow | None] = [None] * rows
        self._writes: list[tuple[np.ndarray, np.ndarray]] = []  # (indices, values) not yet on the device
        self._upload = upload

    def apply(self, plan: StepPlan) -> None:
        """Record what a plan says has changed; `send` writes it to the device."""
        if plan.new_rows:
            self._fill(plan.new_rows)
        if plan.new_blocks:
            self._grow(plan.new_blocks)
        for step in plan.row_steps:
            if step.num_sampled and step.num_known != self.host_length[step.row]:  # a verification came before it
                self.host_length[step.row] = step.num_known
                self._write("length", step.row, (step.num_known,))
            if step.proposed:
                self._write("tokens", step.row, step.proposed, at=step.num_known)

    def _fill(self, new_rows: tuple[NewRow, ...]) -> None:
        for new in new_rows:
            self._requests[new.row] = new
            self.host_length[new.row] = len(new.token_ids)
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
            self._write("tokens", new.row, new.token_ids)
            for group, blocks in enumerate(new.block_tables):
                self._host_groups[group][new.row, : len(blocks)] = blocks
                self._write(self._groups[group], new.row, blocks)
        rows = np.array([new.row for new in new_rows])
        self._writes += [(self._starts[name] + rows, column) for name, column in self._columns(new_rows).items()]

    def _columns(self, new_rows: tuple[NewRow, ...]) -> dict[str, np.ndarray]:
        """What new rows have in each column, [num_new_rows] int32 each."""
        return {"length": int32_array(tuple(len(new.token_ids) for new in new_rows))}

    def _grow(self, new_blocks: tuple[NewBlocks, ...]) -> None:
        for group, name in enumerate(self._groups):
            grown = [
                (new.row, at, block)
                for new in new_blocks
                if new.group == group
                for at, block in enumerate(new.blocks, new.index)
            ]
            if grown:
                rows, columns, blocks = np.array(grown, dtype=np.int32).T
                self._host_groups[group][rows, columns] = blocks
                self._writes.append((self._starts[name] + rows * self._widths[name] + columns, blocks))

    def _write(self, name: str, row: int, values: tuple[int, ...], *, at: int = 0) -> None:
        first = self._starts[name] + row * self._widths[name] + at
        self._writes.append((np.arange(first, first + len(values)), int32_array(values)))

    def send(self, build: Callable[[Upload], Built]) -> Built:
        """Send all that the device needs for a step in one copy: the changes of the table and what `build` adds."""
        upload, changes = self._upload, None
        upload.start(extra=2 * sum(len(values) for _, values in self._writes))
        if self._writes:
            indices, values = zip(*self._writes, strict=True)
            changes = upload.add(np.concatenate(indices)), upload.add(np.concatenate(values))
            self._writes.clear()
        built = build(upload)
        upload.send()
        if changes is not None:
            self._scatter(*changes)
        return built

    def _scatter(self, indices: Tensor, values: Tensor) -> None:
        self._all[indices.long()] = values

    def append(self, rows: Tensor, tokens: Tensor, verification: "Verification | None" = None) -> None:
        """Append sampled `tokens`, [n], to their `rows`, on the device. Row 0, padding, stays empty. Without a
        verification each row occurs once and grows by one token."""
        if verification is None:
            at = self.length[rows]
            new_length = at + (rows > 0)
        else:
            at, new_length = verification.lengths, verification.new_lengths
        self.tokens[rows, at.long()] = tokens.to(torch.int32)
        self.length[rows] = new_length

    def advance(self, rows: np.ndarray) -> None:
        """Count the tokens that `append`, or the sampling kernel, has added to these rows, one each."""
        self.host_length[rows] += 1

    def clear(self) -> None:
        """Forget all requests."""
        self._all.zero_()
        self.host_length[:] = 0
        for blocks in self._host_groups:
            blocks[:] = 0
        self._requests = [None] * len(self._requests)
        self._writes.clear()

    def request(self, row: int) -> NewRow:
        request = self._requests[row]
        assert request is not None, f"row {row} was planned before it was filled"
        return request
