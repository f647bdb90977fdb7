"""The one decoder: every family is a `ModelSpec`, and its layers are built from their specs."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from nanovllm.checkpoint.stored import Slot
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import BuildContext
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import MLP
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import AttentionSpec, LayerSpec, MlpSpec, norm_weight
from nanovllm.layers.step import Step
from nanovllm.models.shard import Shard

if TYPE_CHECKING:
    from nanovllm.layers.part import FeedForward, Mixer, Part


def build_part(spec: Any, context: BuildContext) -> Any:
    """A layer, mixer or feed-forward from its spec; one that is not of the usual kind builds itself."""
    if hasattr(spec, "build"):
        return spec.build(context)
    if isinstance(spec, LayerSpec):
        return DecoderLayer(spec, context)
    if isinstance(spec, AttentionSpec):
        return Attention(spec, context)
    if isinstance(spec, MlpSpec):
        return MLP(spec, context)
    from nanovllm.layers.moe import MoE

    return MoE(spec, context)


class DecoderLayer:
    def __init__(self, spec: LayerSpec, context: BuildContext) -> None:
        self._spec = spec
        self.input_norm = RMSNorm(norm_weight(spec.hidden_size, spec.norm_offset), context, eps=spec.norm_eps)
        self.mixer: Mixer = build_part(spec.mixer, context.within(f"{spec.mixer_name}."))
        self.ffn_norm = RMSNorm(self.input_norm.spec, context, eps=spec.norm_eps)
        self.feed_forward: FeedForward = build_part(spec.feed_forward, context.within(f"{spec.feed_forward_name}."))

    def __call__(self, x: Residual, state: Any, step: Step, wanted: Tensor | None = None) -> Residual:
        """`wanted`: the tokens, [n] indices, whose rows are kept; of the others only the state is updated."""
        mixed = self.mixer.mix(x, state, step if wanted is None else step.of_sampled(), norm=self.input_norm)
        if wanted is not None:
            x.keep(wanted)
            mixed = mixed[wanted]
        if not len(x):
            return x
        x = self.mixer.o_proj(mixed, add_to=x)
        return self.feed_forward(x, norm=self.ffn_norm)

    def parts(self) -> "dict[str, Part]":
        """By name in checkpoints."""
        own, (before, after) = self._spec, self._spec.norm_names
        norms: dict[str, Part] = {before: self.input_norm, after: self.ffn_norm}
        return norms | {own.mixer_name: self.mixer, own.feed_forward_name: self.feed_forward}


class Decoder:
    """A rank's shard of the model: its layers, and of each its heads and columns."""

    def __init__(self, shard: Shard, context: BuildContext) -> None:
        self.shard, self.spec = shard, (spec := shard.model)
        self._context = context
        self._residual: Callable[[Tensor], Residual] = Residual
        if context.kernels:
            from nanovllm.layers.split_k_residual import SplitKResidual

            self._residual = partial(SplitKResidual, pdl=context.pdl)
        embedding = Embedding
        if context.group.size > 1:
            from nanovllm.layers.sharded_embedding import ShardedEmbedding

            embedding = ShardedEmbedding
        self.embed_tokens = embedding(self.spec.embedding_weight(), context) if shard.has_embedding else None
        self.layers: list[DecoderLayer] = [
            build_part(layer, context.within(f"model.layers.{index}."))
            for index, layer in zip(shard.layers, shard.layer_specs, strict=True)
        ]
        self._joined: Callable[..., Tensor | None] = lambda *_: None
        if context.gluon and all(type(layer) is DecoderLayer for layer in self.layers):
            from nanovllm.layers.joined_layers import JoinedLayers

            self._joined = JoinedLayers(self.layers, context)
        self.norm: RMSNorm | None = None
        self.lm_head: Linear | None = None
        if shard.has_head:
            self.norm = RMSNorm(norm_weight(spec.hidden_size, spec.norm_offset), context, eps=spec.norm_eps)
            tied = self.embed_tokens if spec.tie_word_embeddings else None
            weights = {"weight": spec.head_weight()}
            self.lm_head = Linear(weights, context, shared=None if tied is None else tied.weight)

    def __call__(
        self, x: Tensor, states: list[Any], step: Step, wanted: Tensor | None = None, which: slice = slice(None)
    ) -> Tensor:
        """Embedded tokens through all layers, or some of them, [num_tokens, hidden]; `states` has one entry per layer.
        With `wanted`, [n] indices of tokens, gives [n, hidden]: the last layer does no more than these need."""
        if self.spec.scales is not None and 0 in self.shard.layers[which]:
            x = self.spec.scales.embedded(x)
        layers = list(zip(self.layers, states, strict=True))[which]
        if wanted is None and (joined := self._joined(x, layers, step)) is not None:
            return joined
        residual, last = self._residual(x), self.layers[-1]
        for layer, state in layers:
            residual = layer(residual, state, step, wanted if layer is last else None)
        return residual.rows

    def logits(self, hidden: Tensor) -> Tensor | None:  # [num_rows, hidden] -> [num_rows, vocab]
        """On rank 0 of the tensor parallel group; None elsewhere."""
        assert self.lm_head is not None and self.norm is not None
        own = self.lm_head(self._residual(hidden), norm=self.norm)
        if self.spec.scales is not None:
            own = self.spec.scales.scaled_logits(own)
        logits = self._context.group.gather(own, to=0)
        if logits is None or logits.shape[1] == self.spec.vocab_size:
            return logits
        return logits[:, : self.spec.vocab_size].contiguous()  # without the padding of the last ranks' rows

    def _parts(self) -> "dict[str, Part]":
        """By prefix in checkpoints."""
        found: dict[str, Part] = {}
        for index, layer in zip(self.shard.layers, self.layers, strict=True):
            found |= {f"model.layers.{index}.{name}.": part for name, part in layer.parts().items()}
        if self.norm is not None:
            found["model.norm."] = self.norm
        return found

    def slots(self) -> dict[str, Slot]:
        """Where every tensor of a checkpoint goes that this rank holds, by its Hugging Face name."""
        found = {} if self.embed_tokens is None else self.embed_tokens.slots()
        if self.lm_head is not None:
            found |= self.lm_head.slots()
        for prefix, part in self._parts().items():
            found |= {prefix + name: slot for name, slot in part.slots().items()}
        return found

    def finish_loading(self) -> None:
        """Lay the weights out for their kernels, one at a time, so that never two copies of the model exist."""
        for part in self._parts().values():
            part.finish_loading()
        if self.lm_head is not None:
            self.lm_head.finish_loading()
