"""The residual stream of a step: rows that every layer adds to."""

from torch import Tensor

from nanovllm.layers.layernorm import RMSNorm


class Residual:
    def __init__(self, rows: Tensor) -> None:  # [num_tokens, hidden]; may be overwritten
        self.rows = rows

    def __len__(self) -> int:
        return self.rows.shape[0]

    def keep(self, wanted: Tensor) -> None:  # [n] indices of the rows to keep
        self.rows = self.rows[wanted]

    def add_later(self, partial_sums: Tensor) -> None:  # [splits, num_tokens, hidden]; at the latest when rows are read
        self.rows = self.rows + partial_sums.sum(0)

    def take(self) -> tuple[Tensor, Tensor | None]:
        """The rows, and partial sums if there are any, [splits, num_tokens, hidden], which the caller adds in place."""
        return self.rows, None

    def normed(self, norm: RMSNorm) -> Tensor:
        return norm(self.rows)
