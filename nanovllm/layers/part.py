"""The parts of a decoder layer as the decoder sees them."""

from typing import Any, Protocol

from torch import Tensor

from nanovllm.checkpoint.stored import Slot
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.residual import Residual
from nanovllm.layers.step import Step


class Part(Protocol):
    def slots(self) -> dict[str, Slot]: ...
    def finish_loading(self) -> None: ...


class Mixer(Part, Protocol):
    """Moves information between the tokens of a sequence: attention, or another kind."""

    o_proj: Any  # (mixed, add_to=x) adds the result to the residual stream

    def mix(self, x: Residual, state: Any, step: Step, *, norm: RMSNorm) -> Tensor:
        """norm(x) mixed: [num_tokens, ...]. `state` is this layer's, `step` says which tokens belong together."""
        ...


class FeedForward(Part, Protocol):
    def __call__(self, x: Residual, *, norm: RMSNorm) -> Residual: ...
