"""The residual stream of a step: rows that every layer adds to, and split-K partial sums that are not added yet.

Where a linear gives partial sums, the norm that follows adds them up in the same pass over the rows.
"""

from torch import Tensor

from nanovllm.layers.layernorm import RMSNorm


class Residual:
    def __init__(self, rows: Tensor, *, pdl: bool = False) -> None:  # [num_tokens, hidden]; may be overwritten
        self._rows = rows
        self._partial_sums: Tensor | None = None  # [splits, num_tokens, hidden]
        self._pdl = pdl

    @property
    def num_rows(self) -> int:
        return self._rows.shape[0]

    def __len__(self) -> int:
        return self._rows.shape[0]

    @property
    def rows(self) -> Tensor:
        """With everything added."""
        if self._partial_sums is not None:
            from nanovllm.kernels.elementwise.rms_norm import add_partial_sums

            add_partial_sums(self._rows, self._partial_sums, pdl=self._pdl)
            self._partial_sums = None
        return self._rows

    @rows.setter
    def rows(self, rows: Tensor) -> None:
        self._rows, self._partial_sums = rows, None

    def add_later(self, partial_sums: Tensor) -> None:  # [splits, num_tokens, hidden]
        """Add these with the next norm, or when the rows are asked for."""
        self._rows, self._partial_sums = self.rows, partial_sums

    def keep(self, wanted: Tensor) -> None:
        """Keep only these rows, [n] indices."""
        self.rows = self.rows[wanted]

    def normed(self, norm: RMSNorm) -> Tensor:
        if self._partial_sums is None:
            return norm(self._rows)
        normed = norm.after_adding(self._rows, self._partial_sums)
        self._partial_sums = None
        return normed
