"""What the scheduler asks of a grammar that a completion must follow."""

from collections.abc import Sequence as Seq
from typing import Protocol


class Guide(Protocol):
    """Decides which tokens may come next in a completion that must follow a grammar.

    A mask has one bit per token, low bits first.
    """

    @property
    def num_tokens(self) -> int:
        """How many tokens of the completion it has followed."""
        ...

    def mask_after(self, new_tokens: Seq[int]) -> bytes | None:
        """Follow these tokens and return the mask of the next one; None if the grammar cannot be followed further."""
        ...

    def masks_after_proposed(self, proposed: Seq[int]) -> list[bytes]:
        """Return the masks after each of these tokens in turn, as far as the grammar allows them, without following
        them."""
        ...
