"""The one Llama-shaped decoder. Families differ only in what their `ModelConfig` says."""

import re
from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, LayerCache
from nanovllm.checkpoint.stored import Part, Slot
from nanovllm.distributed.group import ALONE, Group, Place
from nanovllm.distributed.share import Share, Span, share_of
from nanovllm.layers.attention import Attention
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear, make_linear
from nanovllm.layers.moe import MoE
from nanovllm.layers.residual import Residual
from nanovllm.models.spec import ModelConfig

LAYER_NAME = re.compile(r"model\.layers\.(0|[1-9][0-9]*)\.(.*)")


class MLP:
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
        group: Group,  # whose ranks have a share of the columns each
    ) -> None:
        self.group = group
        self.gate_up_proj = make_linear(
            hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device, deterministic=deterministic
        )
        down_bias = bias and group.rank == 0
        self.down_proj = make_linear(
            intermediate_size, hidden_size, bias=down_bias, dtype=dtype, device=device, deterministic=deterministic
        )

    def add_to(self, residual: Residual, norm: RMSNorm) -> None:
        """residual += mlp(norm(residual))"""
        residual.add(self.down_proj, self.gate_up_proj.gated_after_norm(norm, residual), self.group)

    def finish_loading(self) -> None:
        self.gate_up_proj.finish_loading()
        self.down_proj.finish_loading()


class DecoderLayer:
    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool,
        group: Group,
    ) -> None:
        hidden = config.hidden_size
        self.input_layernorm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self.self_attn = Attention(
            hidden_size=hidden,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            qkv_bias=config.qkv_bias,
            o_bias=config.o_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            window=config.windows[layer],
            backend=backend,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            group=group,
        )
        self.post_attention_layernorm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self.mlp: MLP | MoE
        if config.moe is not None and config.is_moe_layer(layer):
            self.mlp = MoE(
                hidden_size=hidden,
                intermediate_size=config.moe.intermediate_size,
                num_experts=config.moe.num_experts,
                num_experts_per_token=config.moe.num_experts_per_token,
                norm_topk_prob=config.moe.norm_topk_prob,
                dtype=dtype,
                device=device,
                deterministic=deterministic,
                group=group,
            )
        else:
            self.mlp = MLP(
                hidden,
                config.intermediate_size,
                bias=config.mlp_bias,
                dtype=dtype,
                device=device,
                deterministic=deterministic,
                group=group,
            )

    def add_to(self, residual: Residual, cache: LayerCache, step: Any, wanted: Tensor | None = None) -> None:
        """`wanted`: the tokens, [n] indices, whose rows are left; of the others only keys and values are."""
        self.self_attn.add_to(residual, self.input_layernorm, cache, step, wanted)
        if len(residual):
            self.mlp.add_to(residual, self.post_attention_layernorm)


class Decoder:
    """A rank's share of the model: its layers, and of each its heads and columns."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        deterministic: bool = False,
        share: Share | None = None,
        group: Group = ALONE,  # those that share the layers
    ) -> None:
        self.config = config
        self.share = share = share or share_of(config, Place())
        self.group = group = group.in_order() if deterministic else group
        hidden = config.hidden_size
        rows = share.vocab_rows if share.has_embedding else 0
        self.embed_tokens = Embedding(rows, hidden, dtype=dtype, device=device, group=group)
        self.layers = [
            DecoderLayer(
                share.model,
                layer,
                backend=backend,
                dtype=dtype,
                device=device,
                deterministic=deterministic,
                group=group,
            )
            for layer in range(share.model.num_layers)
        ]
        self.norm = RMSNorm(hidden, eps=config.rms_norm_eps, dtype=dtype, device=device)
        self._shares_weight = config.tie_word_embeddings and share.has_embedding
        size = (hidden, share.vocab_rows) if share.has_head and not self._shares_weight else (0, 0)
        self.lm_head = make_linear(*size, bias=False, dtype=dtype, device=device, deterministic=deterministic)
        if self._shares_weight:
            self.lm_head.weight = self.embed_tokens.weight

    def __call__(self, x: Tensor, caches: list[LayerCache], step: Any, wanted: Tensor | None = None) -> Tensor:
        """Embedded tokens through all layers, [num_tokens, hidden]; `step` is the attention backend's own.

        With `wanted`, [n] indices of tokens, gives [n, hidden]: the last layer does no more than these need.
        """
        residual = Residual(x)
        last = len(self.layers) - 1
        for index, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            layer.add_to(residual, cache, step, wanted if index == last else None)
        return residual.rows

    def logits(self, hidden: Tensor) -> Tensor | None:  # [num_rows, hidden] -> [num_rows, vocab]
        """On rank 0 of the group; None elsewhere."""
        logits = self.group.gather(self.lm_head.after_norm(self.norm, Residual(hidden)), to=0)
        if logits is None or logits.shape[1] == self.config.vocab_size:
            return logits
        return logits[:, : self.config.vocab_size].contiguous()  # without the padding of the last ranks' rows

    # --- weights ------------------------------------------------------------------------------------------------------

    def destinations(self) -> dict[str, Slot]:
        """Where every tensor of a checkpoint goes, by its Hugging Face name: views of the parameters."""
        found = {}
        if self.share.has_embedding:
            found["model.embed_tokens.weight"] = self._of_vocabulary(self.embed_tokens.weight)
        if self.share.has_head:
            found["model.norm.weight"] = Slot.whole(self.norm.weight)
            if not self._shares_weight:
                name = "model.embed_tokens.weight" if self.config.tie_word_embeddings else "lm_head.weight"
                found[name] = self._of_vocabulary(self.lm_head.weight)
        for index, layer in zip(self.share.layers, self.layers, strict=True):
            prefix = f"model.layers.{index}."
            found |= {prefix + name: slot for name, slot in self._layer_destinations(layer).items()}
        return found

    def _of_vocabulary(self, weight: Tensor) -> Slot:
        vocab = self.share.vocab  # the rows behind it are padding, which nobody looks at
        return Slot(weight[: vocab.size], (vocab.whole, weight.shape[1]), _unless_whole(vocab, (vocab.part,)))

    def _layer_destinations(self, layer: DecoderLayer) -> dict[str, Slot]:
        share = self.share
        attention = layer.self_attn
        found = {
            "input_layernorm.weight": Slot.whole(layer.input_layernorm.weight),
            "post_attention_layernorm.weight": Slot.whole(layer.post_attention_layernorm.weight),
        }
        qkv = {"q_proj": share.queries, "k_proj": share.keys, "v_proj": share.keys}
        found |= _rows("self_attn.", attention.qkv_proj, qkv)
        found |= _columns("self_attn.o_proj.", attention.o_proj, share.queries)
        if self.config.qk_norm:
            found["self_attn.q_norm.weight"] = Slot.whole(attention.q_norm)
            found["self_attn.k_norm.weight"] = Slot.whole(attention.k_norm)
        if isinstance(layer.mlp, MoE):
            assert share.experts is not None
            return found | _expert_destinations(layer.mlp, share.experts)
        found |= _rows("mlp.", layer.mlp.gate_up_proj, {"gate_proj": share.mlp, "up_proj": share.mlp})
        return found | _columns("mlp.down_proj.", layer.mlp.down_proj, share.mlp)

    def elsewhere(self, name: str) -> bool:
        """Whether a tensor of a checkpoint, none of `destinations`, has its place on other ranks, or needs none."""
        if name == "lm_head.weight":
            return self.config.tie_word_embeddings or not self.share.has_head
        if layer := LAYER_NAME.match(name):
            if int(layer[1]) in self.share.layers:
                return self.group.rank > 0 and layer[2] in ("self_attn.o_proj.bias", "mlp.down_proj.bias")
            return int(layer[1]) < self.config.num_layers
        return name in ("model.embed_tokens.weight", "model.norm.weight")

    def finish_loading(self) -> None:
        """Lay the weights out for their kernels, one at a time, so that never two copies of the model exist."""
        for layer in self.layers:
            for part in (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp):
                part.finish_loading()
        self.norm.finish_loading()
        if self.share.has_head:
            self.lm_head.finish_loading(keep_weight=self._shares_weight)


def _rows(prefix: str, linear: Linear, spans: dict[str, Span]) -> dict[str, Slot]:
    """The rows of a fused linear that a checkpoint keeps as tensors of their own."""
    found = {}
    begin = 0
    for name, span in spans.items():
        here, part = slice(begin, begin + span.size), _unless_whole(span, (span.part,))
        found[f"{prefix}{name}.weight"] = Slot(linear.weight[here], (span.whole, linear.weight.shape[1]), part)
        if linear.bias is not None:
            found[f"{prefix}{name}.bias"] = Slot(linear.bias[here], (span.whole,), part)
        begin += span.size
    return found


def _columns(prefix: str, linear: Linear, span: Span) -> dict[str, Slot]:
    found = {f"{prefix}weight": _some_columns(linear.weight, span)}
    if linear.bias is not None:
        found[f"{prefix}bias"] = Slot.whole(linear.bias)
    return found


def _some_columns(weight: Tensor, span: Span) -> Slot:
    return Slot(weight, (weight.shape[0], span.whole), _unless_whole(span, (slice(None), span.part)))


def _unless_whole(span: Span, part: Part) -> Part:
    return () if span.size == span.whole else part


def _expert_destinations(moe: MoE, columns: Span) -> dict[str, Slot]:
    found = {"mlp.gate.weight": Slot.whole(moe.gate.weight)}
    hidden, size = moe.gate_up.shape[2], columns.size
    part = _unless_whole(columns, (columns.part,))
    for expert in range(moe.gate_up.shape[0]):
        name = f"mlp.experts.{expert}."
        for projection, view in (("gate", moe.gate_up[expert, :size]), ("up", moe.gate_up[expert, size:])):
            found[f"{name}{projection}_proj.weight"] = Slot(view, (columns.whole, hidden), part)
        found[f"{name}down_proj.weight"] = _some_columns(moe.down[expert], columns)
    return found
