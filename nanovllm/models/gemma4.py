"""Gemma 4: as Gemma 3, with larger heads in layers of full attention, normalized values, a factor after each layer and
bounded logits. Some have per-layer embeddings and layers that read the keys and values of earlier ones, some experts
beside the MLP. Norms are stored as they are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanovllm.checkpoint.names import FileNames
from nanovllm.errors import CheckpointError
from nanovllm.layers.normed_router_spec import NormedRouterMoeSpec
from nanovllm.layers.refine import refine
from nanovllm.layers.rope_spec import ListedScaling
from nanovllm.layers.shared_kv_spec import SharedKvAttentionSpec
from nanovllm.layers.spec import AttentionSpec, LayerSpec, MlpSpec, RopeSpec
from nanovllm.layers.value_norm_spec import ValueNormAttentionSpec
from nanovllm.models.changes import change_attention
from nanovllm.models.gemma3 import ACTIVATION, AFTER, BEFORE
from nanovllm.models.gemma4_layer_spec import EXPERTS, Gemma4LayerSpec
from nanovllm.models.known_values import check_known
from nanovllm.models.layer_kinds import FULL, SLIDING, attention_kinds
from nanovllm.models.per_layer_spec import PerLayerSpec
from nanovllm.models.scales import Scales
from nanovllm.models.spec import ModelSpec, count, llama_shaped, read_rope
from nanovllm.models.text_part import text_part

DEFAULTS: dict[str, Any] = {  # which files may leave out
    "vocab_size": 262144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
}
UNIFIED_DEFAULTS = DEFAULTS | {  # of 12B, whose images and sounds have no towers; it has no per-layer embeddings
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "hidden_size_per_layer_input": 0,
}
RENAMED = (
    (r"\.layer_scalar$", ".layer_scalar.weight"),
    (r"(\.layers\.\d+)\.(router|experts)\.", rf"\1.{EXPERTS}.\2."),
)
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


def spec(raw: dict[str, Any]) -> ModelSpec:
    unified = raw["architectures"][0].startswith("Gemma4Unified")
    kind = "gemma4_unified_text" if unified else "gemma4_text"
    raw = (UNIFIED_DEFAULTS if unified else DEFAULTS) | text_part(raw, known=(kind,))
    check_known(raw, ACTIVATION | {"use_bidirectional_attention": (None, False, "vision")})  # of images alone
    kinds = [*attention_kinds(raw, full_every=6)[:-1], FULL]
    windows = [raw["sliding_window"] if kind == SLIDING else None for kind in kinds]
    bias, same = bool(raw.get("attention_bias", False)), bool(raw.get("attention_k_eq_v", False))
    model = llama_shaped(raw, windows=windows, qk_norm=True, qkv_bias=bias, o_bias=bias)
    ropes = raw.get("rope_parameters") or ROPES
    sources = _kv_sources(raw, kinds)

    def attention(index: int, own: AttentionSpec) -> AttentionSpec:
        full = kinds[index] == FULL
        if full:
            own = replace(own, **_full_size(raw, index))
        rope = _rope(raw, ropes[kinds[index]], own.head_dim)
        return refine(
            ValueNormAttentionSpec,
            replace(own, rope=rope, scale=1.0),
            values_are_keys=full and same,
            shared_as=index if index in sources.values() else None,
        )

    per_layer, experts = _per_layer(raw, model), _experts(raw, model)

    def layer(index: int, own: LayerSpec) -> Gemma4LayerSpec:
        assert isinstance(own.feed_forward, MlpSpec)
        mlp = replace(own.feed_forward, activation="gelu")
        mixer: Any = own.mixer
        if index in sources:
            source = changed.layers[sources[index]].mixer
            assert isinstance(source, AttentionSpec)
            mixer = SharedKvAttentionSpec(attention=source, index=index, source=sources[index])
            if raw.get("use_double_wide_mlp"):
                mlp = replace(mlp, intermediate_size=2 * mlp.intermediate_size)
        size = 0 if per_layer is None else per_layer.size
        changes: dict[str, Any] = {"mixer": mixer, "feed_forward": mlp, "norm_names": BEFORE, "after_names": AFTER}
        return Gemma4LayerSpec.of(own, index=index, input_size=size, experts=experts, **changes)

    changed = change_attention(model, attention)
    return replace(
        changed,
        layers=tuple(layer(index, own) for index, own in enumerate(changed.layers)),
        per_layer=per_layer,
        scales=Scales(
            embedding=math.sqrt(model.hidden_size), rounds_embedding=True, logits_cap=raw.get("final_logit_softcapping")
        ),
        file_names=FileNames(RENAMED, unused=_unused(sources)),
    )


def _kv_sources(raw: dict[str, Any], kinds: Sequence[str]) -> dict[int, int]:
    """By layer that has no keys and values: the layer whose it reads, the last of its kind that has them."""
    num_shared = raw.get("num_kv_shared_layers") or 0
    own = kinds[: len(kinds) - num_shared]
    if not set(kinds) <= set(own):
        raise CheckpointError(f"config: num_kv_shared_layers={num_shared} leaves no layer of every kind to read from")
    return {index: len(own) - 1 - own[::-1].index(kinds[index]) for index in range(len(own), len(kinds))}


def _unused(sources: Mapping[int, int]) -> str | None:
    """Files have keys and values of these layers as well."""
    layers = "|".join(map(str, sources))
    named = r"self_attn\.(k_proj|v_proj|k_norm|v_norm)\."
    return rf"^(model\.|language_model\.)*layers\.({layers})\.{named}" if sources else None


def _per_layer(raw: dict[str, Any], model: ModelSpec) -> PerLayerSpec | None:
    if not raw["hidden_size_per_layer_input"]:
        return None
    num_tokens = count(raw, "vocab_size_per_layer_input")
    if num_tokens < model.vocab_size:
        raise CheckpointError(f"config: vocab_size_per_layer_input={num_tokens} is below vocab_size={model.vocab_size}")
    return PerLayerSpec(
        vocab_size=num_tokens,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        size=count(raw, "hidden_size_per_layer_input"),
        norm_eps=model.norm_eps,
    )


def _experts(raw: dict[str, Any], model: ModelSpec) -> NormedRouterMoeSpec | None:
    if not raw.get("enable_moe_block"):
        return None
    num_experts = count(raw, "num_experts")
    return NormedRouterMoeSpec(
        hidden_size=model.hidden_size,
        intermediate_size=count(raw, "moe_intermediate_size"),
        num_experts=num_experts,
        num_experts_per_token=count(raw, "top_k_experts", most=num_experts),
        norm_topk_prob=True,
        activation="gelu",
        router_name="router.proj",
        router_norm_eps=model.norm_eps,
    )


def _full_size(raw: dict[str, Any], index: int) -> dict[str, Any]:
    """Size of the heads, and the number of KV heads, of a layer of full attention."""
    heads = raw.get("num_global_key_value_heads") if raw.get("attention_k_eq_v") else None
    stated = {"head_dim": raw["global_head_dim"], "num_key_value_heads": heads or raw["num_key_value_heads"]}
    stated |= raw.get("per_layer_config", {}).get(str(index), {})  # newer files
    return {"head_dim": stated["head_dim"], "num_kv_heads": stated["num_key_value_heads"]}


def _rope(raw: dict[str, Any], parameters: dict[str, Any], head_dim: int) -> RopeSpec:
    if parameters.get("rope_type") != "proportional":
        config = raw | {"rope_parameters": parameters}
        return read_rope(config, head_dim=head_dim, max_position=raw["max_position_embeddings"])
    # as many frequencies as a whole head has; the last ones, which divide by infinity, are 0
    rotated = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
    factors = (float(parameters.get("factor", 1.0)),) * rotated + (math.inf,) * (head_dim // 2 - rotated)
    return RopeSpec(theta=float(parameters["rope_theta"]), scaling=ListedScaling(factors))
