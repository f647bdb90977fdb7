"""Layers that norm what a part gives before it is added: x + norm(mixer(x)), then x + norm(feed_forward(x)).

In a sandwich, each part also gets normed inputs: x + norm(mixer(norm(x))).
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.mlp import MLP
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import LayerSpec, norm_weight
from nanovllm.layers.step import Step
from nanovllm.models.decoder import DecoderLayer

if TYPE_CHECKING:
    from nanovllm.layers.part import Part
    from nanovllm.models.post_norm_spec import SandwichLayerSpec


class PostNormLayer(DecoderLayer):
    def __init__(self, spec: LayerSpec, context: BuildContext) -> None:
        super().__init__(spec, context)
        self._before: tuple[RMSNorm | None, RMSNorm | None] = (None, None)
        self._after = (self.input_norm, self.ffn_norm)

    def __call__(self, x: Residual, state: Any, step: Step, wanted: Tensor | None = None) -> Residual:
        mixer: Any = self.mixer
        mixed = mixer.mix(x, state, step if wanted is None else step.of_sampled(), norm=self._before[0])
        if wanted is not None:
            x.keep(wanted)
            mixed = mixed[wanted]
        if not len(x):
            return x
        x.rows = x.rows + self._after[0](mixer.o_proj(mixed))
        x.rows = x.rows + self._after[1](self._fed_forward(x))
        return x

    def _fed_forward(self, x: Residual) -> Tensor:
        """What the feed-forward gives, before the norm after it."""
        mlp, norm = self.feed_forward, self._before[1]
        assert isinstance(mlp, MLP)
        if norm is None:
            gated = mlp.gate_up_proj(x.rows, activation=mlp.activation)
        else:
            gated = mlp.gate_up_proj(x, norm=norm, activation=mlp.activation)
        return mlp.down_proj(gated)


class SandwichLayer(PostNormLayer):
    def __init__(self, spec: "SandwichLayerSpec", context: BuildContext) -> None:
        super().__init__(spec, context)
        norm = norm_weight(spec.hidden_size, spec.norm_offset)
        first, second = (RMSNorm(norm, context, eps=spec.norm_eps) for _ in spec.after_names)
        self._before, self._after = self._after, (first, second)
        self._after_names = spec.after_names

    def parts(self) -> "dict[str, Part]":
        return super().parts() | dict(zip(self._after_names, self._after, strict=True))
