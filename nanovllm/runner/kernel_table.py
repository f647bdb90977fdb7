"""The request table for our kernels: it also says which rows decode, and how each row samples."""

from typing import Any

import numpy as np
from torch import Tensor

from nanovllm.kernels.table.scatter import scatter
from nanovllm.plan import NewRow
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.sampling_columns import COLUMNS, SamplingColumns


class KernelTable(RequestTable):
    def __init__(self, **sizes: Any) -> None:
        super().__init__(**sizes, columns=COLUMNS)
        self.decode_rows = self._views["decode_rows"]  # [max_num_seqs] rows that decode, padded with row 0
        self.sampling = SamplingColumns(self._views)

    @property
    def has_changes(self) -> bool:
        """Whether there are changes that `send` has not sent yet."""
        return bool(self._writes)

    def set_decode_rows(self, rows: tuple[int, ...], *, size: int) -> None:
        """Set the rows that decode from now on, padded to `size`."""
        self._write("decode_rows", 0, rows + (0,) * (size - len(rows)))

    def _columns(self, new_rows: tuple[NewRow, ...]) -> dict[str, np.ndarray]:
        return super()._columns(new_rows) | self.sampling.values_of(new_rows)

    def _scatter(self, indices: Tensor, values: Tensor) -> None:
        scatter(self._all, indices, values)
