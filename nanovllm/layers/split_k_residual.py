"""The residual stream where kernels run: a split-K linear gives partial sums, which are not added at once.

The norm that follows adds them up in the same pass over the rows.
"""

from torch import Tensor

from nanovllm.kernels.elementwise.rms_norm import add_partial_sums, add_rms_norm
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual import Residual


class SplitKResidual(Residual):
    def __init__(self, rows: Tensor, *, pdl: bool = False) -> None:  # [num_tokens, hidden]; may be overwritten
        self._rows = rows
        self._partial_sums: Tensor | None = None  # [splits, num_tokens, hidden]
        self._pdl = pdl

    def __len__(self) -> int:
        return self._rows.shape[0]

    @property
    def rows(self) -> Tensor:
        """With everything added."""
        if self._partial_sums is not None:
            add_partial_sums(self._rows, self._partial_sums, pdl=self._pdl)
            self._partial_sums = None
        return self._rows

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._rows, self._partial_sums = rows, None

    def add_later(self, partial_sums: Tensor) -> None:  # [splits, num_tokens, hidden]
        """Add these with the next norm, or when the rows are asked for."""
        self._rows, self._partial_sums = self.rows, partial_sums

    def take(self) -> tuple[Tensor, Tensor | None]:
        partial_sums, self._partial_sums = self._partial_sums, None
        return self._rows, partial_sums

    def normed(self, norm: RMSNorm) -> Tensor:
        if self._partial_sums is None:
            return norm(self._rows)
        normed = add_rms_norm(self._rows, self._partial_sums, norm.weight, norm.eps, pdl=self._pdl)
        self._partial_sums = None
        return normed
