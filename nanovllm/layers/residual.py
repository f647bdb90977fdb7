"""The residual stream of a step: rows that every layer adds to, and partial sums that are not added yet.

Where a linear returns split-K partial sums, the norm that follows adds them to the rows.
"""

from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.distributed.group import Group
from nanovllm.kernels.launch import dependent_launch
from nanovllm.layers.layernorm import RMSNorm

if TYPE_CHECKING:
    from nanovllm.layers.linear import Linear


class Residual:
    def __init__(self, rows: Tensor) -> None:  # [num_tokens, hidden]; may be written over
        self._rows = rows
        self._partial_sums: Tensor | None = None  # [splits, num_tokens, hidden]

    def __len__(self) -> int:
        return self._rows.shape[0]

    @property
    def rows(self) -> Tensor:
        """With everything added."""
        if self._partial_sums is not None:
            from nanovllm.kernels.elementwise.rms_norm import add_partial_sums

            add_partial_sums(self._rows, self._partial_sums, pdl=dependent_launch())
            self._partial_sums = None
        return self._rows

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._rows, self._partial_sums = rows, None

    def keep(self, wanted: Tensor) -> None:
        """Only these of the rows, [n] indices, from here on."""
        self.rows = self.rows[wanted]

    def normed(self, norm: RMSNorm) -> Tensor:
        if self._partial_sums is None:
            return norm(self._rows)
        normed = norm.after_adding(self._rows, self._partial_sums)
        self._partial_sums = None
        return normed

    def add(self, linear: "Linear", x: Tensor, group: Group) -> None:
        """linear(x), summed over ranks that have a share of the input each; rank 0's sum carries the rows."""
        rows = self.rows
        if group.size == 1 and (partial_sums := linear.split_k(x)) is not None:
            self._partial_sums = partial_sums
        else:
            self.rows = group.all_reduce(linear.add_to(rows, x) if group.rank == 0 else linear(x))
