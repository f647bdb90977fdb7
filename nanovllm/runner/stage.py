"""The part of the model that a rank computes, from the tokens of a step to logits. Here it is all of the model."""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanovllm.layers.context import BuildContext
from nanovllm.layers.step import Step
from nanovllm.models.decoder import Decoder
from nanovllm.runner.request_table import RequestTable

if TYPE_CHECKING:
    from nanovllm.runner.verification import Verification


class Stage:
    """The whole model on one rank; `PipelineStage` is that of several ranks."""

    def __init__(self, model: Decoder, context: BuildContext) -> None:
        self.model = model
        self.kernels = None
        if context.kernels and context.group.size == 1 and model.embed_tokens and model.spec.per_layer is None:
            from nanovllm.runner.kernel_inputs import KernelInputs

            self.kernels = KernelInputs(model.embed_tokens, pdl=context.pdl)

    def inputs(self, tokens: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """The input of the layers for tokens[row, position], given [num_tokens] rows and positions."""
        if self.kernels is not None:
            return self.kernels.of_rows(tokens, rows, positions)
        assert self.model.embed_tokens is not None
        return self.model.embed_tokens(tokens[rows, positions])

    def forward(self, x: Tensor, states: list[Any], step: Step, wanted: Tensor | None = None) -> Tensor | None:
        """Run the layers; returns hidden states on the last pipeline stage, else None. `wanted`: [n] indices of the
        tokens whose hidden states are needed; None = all."""
        return self.model(x, states, step, wanted)

    def logits(self, hidden: Tensor | None) -> Tensor | None:  # [num_rows, hidden] -> [num_rows, vocab]
        """On the first rank of the last stage, which samples; None on all others."""
        return None if hidden is None else self.model.logits(hidden)

    def broadcast_tokens(self, tokens: Tensor) -> None:
        """Broadcast the sampled tokens, [n]; called on the rank that sampled and has appended them to its table."""

    def receive_tokens(self, table: RequestTable, rows: Tensor, verification: "Verification | None" = None) -> Tensor:
        """Receive the [n] sampled tokens of [n] rows, 0 = padding, and append them; called on all other ranks."""
        raise AssertionError("the only rank samples")

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the `x` of the rank that samples, on all ranks."""
        return x
