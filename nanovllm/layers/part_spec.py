"""What the specs of a layer's parts have in common; no torch."""

from typing import Protocol

from nanovllm.layers.spec import Weight
from nanovllm.row_state import RowState
from nanovllm.state import PagedState


class PartSpec(Protocol):
    """What every part of a layer (mixer, feed-forward) states about itself."""

    def weights(self) -> dict[str, Weight]:
        """Its parameters by the part's own names; checkpoint names are relative to the part."""
        ...


class MixerSpec(PartSpec, Protocol):
    """A part that moves information between the tokens of a sequence, such as attention."""

    def state(self, dtype: str, num_ranks: int = 1) -> PagedState | RowState:
        """What one of `num_ranks` tensor parallel ranks keeps for every token, or for every running sequence.

        `dtype` is that of the KV cache.
        """
        ...
