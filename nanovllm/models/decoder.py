"""The one Llama-shaped decoder. Families differ only in what their `ModelConfig` says."""

from typing import Any

import torch
from torch import Tensor

from nanovllm.attention.backend import AttentionBackend, LayerCache
from nanovllm.layers.attention import Attention
from nanovllm.layers.embedding import Embedding
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear, make_linear
from nanovllm.layers.moe import MoE
from nanovllm.model_config import ModelConfig


class MLP:
    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        invariant: bool,
    ) -> None:
        self.gate_up_proj = make_linear(
            hidden_size, 2 * intermediate_size, bias=bias, dtype=dtype, device=device, invariant=invariant
        )
        self.down_proj = make_linear(
            intermediate_size, hidden_size, bias=bias, dtype=dtype, device=device, invariant=invariant
        )

    def add_to(self, residual: Tensor, norm: RMSNorm) -> Tensor:
        """residual + mlp(norm(residual)), all [num_tokens, hidden]; `residual` may be written over."""
        return self.down_proj.add_to(residual, self.gate_up_proj.gated_after_norm(norm, residual))

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
        invariant: bool,
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
            invariant=invariant,
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
                invariant=invariant,
            )
        else:
            self.mlp = MLP(
                hidden,
                config.intermediate_size,
                bias=config.mlp_bias,
                dtype=dtype,
                device=device,
                invariant=invariant,
            )

    def __call__(self, x: Tensor, cache: LayerCache, step: Any) -> Tensor:
        x = self.self_attn.add_to(x, self.input_layernorm, cache, step)
        return self.mlp.add_to(x, self.post_attention_layernorm)


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        *,
        backend: AttentionBackend,
        dtype: torch.dtype,
        device: torch.device,
        invariant: bool = False,
    ) -> None:
        self.config = config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, layer, backend=backend, dtype=dtype, device=device, invariant=invariant)
            for layer in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device)
        size = (0, 0) if config.tie_word_embeddings else (config.hidden_size, config.vocab_size)
        self.lm_head = make_linear(*size, bias=False, dtype=dtype, device=device, invariant=invariant)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def __call__(self, x: Tensor, caches: list[LayerCache], step: Any) -> Tensor:
        """Embedded tokens through all layers, [num_tokens, hidden]; `step` is the attention backend's own."""
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, cache, step)
        return x

    def logits(self, hidden: Tensor) -> Tensor:  # [num_rows, hidden] -> [num_rows, vocab]
        return self.lm_head.after_norm(self.norm, hidden)

    # --- weights ------------------------------------------------------------------------------------------------------

    def destinations(self) -> dict[str, Tensor]:
        """Where every tensor of a checkpoint goes, by its Hugging Face name: views of the parameters."""
        found = {
            "model.embed_tokens.weight": self.embed_tokens.weight,
            "model.norm.weight": self.norm.weight,
        }
        if not self.config.tie_word_embeddings:
            found["lm_head.weight"] = self.lm_head.weight
        for index, layer in enumerate(self.layers):
            prefix = f"model.layers.{index}."
            found |= {prefix + name: view for name, view in self._layer_destinations(layer).items()}
        return found

    def _layer_destinations(self, layer: DecoderLayer) -> dict[str, Tensor]:
        config = self.config
        attention = layer.self_attn
        found = {
            "input_layernorm.weight": layer.input_layernorm.weight,
            "post_attention_layernorm.weight": layer.post_attention_layernorm.weight,
        }
        qkv = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
        found |= _parts("self_attn.", attention.qkv_proj, qkv)
        found |= _parts("self_attn.", attention.o_proj, {"o_proj": config.hidden_size})
        if config.qk_norm:
            found["self_attn.q_norm.weight"] = attention.q_norm
            found["self_attn.k_norm.weight"] = attention.k_norm
        if isinstance(layer.mlp, MoE):
            return found | _expert_destinations(layer.mlp)
        gate_up = {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size}
        found |= _parts("mlp.", layer.mlp.gate_up_proj, gate_up)
        return found | _parts("mlp.", layer.mlp.down_proj, {"down_proj": config.hidden_size})

    def finish_loading(self) -> None:
        """Lay the weights out for their kernels, one at a time, so that never two copies of the model exist."""
        for layer in self.layers:
            for part in (layer.input_layernorm, layer.self_attn, layer.post_attention_layernorm, layer.mlp):
                part.finish_loading()
        self.norm.finish_loading()
        self.lm_head.finish_loading(keep_weight=self.config.tie_word_embeddings)


def _parts(prefix: str, linear: Linear, sizes: dict[str, int]) -> dict[str, Tensor]:
    """The slices of a fused linear that a checkpoint keeps as tensors of their own."""
    found = {}
    begin = 0
    for name, size in sizes.items():
        found[f"{prefix}{name}.weight"] = linear.weight[begin : begin + size]
        if linear.bias is not None:
            found[f"{prefix}{name}.bias"] = linear.bias[begin : begin + size]
        begin += size
    return found


def _expert_destinations(moe: MoE) -> dict[str, Tensor]:
    found = {"mlp.gate.weight": moe.gate.weight}
    size = moe.gate_up.shape[1] // 2
    for expert in range(moe.gate_up.shape[0]):
        found[f"mlp.experts.{expert}.gate_proj.weight"] = moe.gate_up[expert, :size]
        found[f"mlp.experts.{expert}.up_proj.weight"] = moe.gate_up[expert, size:]
        found[f"mlp.experts.{expert}.down_proj.weight"] = moe.down[expert]
    return found
