"""Gemma 3: windows in five of six layers with rotary positions of their own, norms before and after each part of a
layer whose weights are stored as w - 1, a GELU gate, scaled embeddings."""

import math
from dataclasses import replace
from typing import Any

from nanovllm.layers.spec import AttentionSpec, LayerSpec, MlpSpec
from nanovllm.models.changes import change_attention
from nanovllm.models.known_values import check_known
from nanovllm.models.layer_kinds import SLIDING, attention_kinds
from nanovllm.models.post_norm_spec import SandwichLayerSpec
from nanovllm.models.scales import Scales
from nanovllm.models.spec import ModelSpec, llama_shaped, read_rope
from nanovllm.models.text_part import text_part

DEFAULTS: dict[str, Any] = {  # which files with a vision tower leave out
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "norm_offset": 1.0,  # 0 in GGUF files
}
ACTIVATION = {"hidden_activation": ("gelu_pytorch_tanh",)}
NOT_IMPLEMENTED = {"attn_logit_softcapping": (None,), "use_bidirectional_attention": (None, False)}
BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = DEFAULTS | text_part(raw, known=("gemma3_text",))
    check_known(raw, ACTIVATION | NOT_IMPLEMENTED)
    kinds = attention_kinds(raw, full_every=raw.get("sliding_window_pattern", 6))
    windows = [raw["sliding_window"] if kind == SLIDING else None for kind in kinds]
    bias, offset = bool(raw.get("attention_bias", False)), raw["norm_offset"]
    model = llama_shaped(raw, windows=windows, qk_norm=True, qkv_bias=bias, o_bias=bias)
    ropes = {
        kind: read_rope(_rope_of(raw, kind), head_dim=raw["head_dim"], max_position=model.max_position)
        for kind in set(kinds)
    }
    scale = raw["query_pre_attn_scalar"] ** -0.5

    def attention(index: int, own: AttentionSpec) -> AttentionSpec:
        return replace(own, rope=ropes[kinds[index]], scale=scale, qk_norm_offset=offset)

    def layer(own: LayerSpec) -> SandwichLayerSpec:
        assert isinstance(own.feed_forward, MlpSpec)
        mlp = replace(own.feed_forward, activation="gelu")
        return SandwichLayerSpec.of(own, feed_forward=mlp, norm_offset=offset, norm_names=BEFORE, after_names=AFTER)

    changed = change_attention(model, attention)
    scales = Scales(
        embedding=math.sqrt(model.hidden_size), rounds_embedding=True, logits_cap=raw.get("final_logit_softcapping")
    )
    return replace(changed, layers=tuple(map(layer, changed.layers)), norm_offset=offset, scales=scales)


def _rope_of(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """The config with the rotary positions of one kind of layers. In older files only full attention is scaled."""
    parameters = dict((raw.get("rope_parameters") or {}).get(kind) or {})
    if kind == SLIDING:
        theta, scaling = raw.get("rope_local_base_freq", 10_000.0), None
    else:
        theta, scaling = raw.get("rope_theta", 1_000_000.0), raw.get("rope_scaling")
    return raw | {"rope_parameters": {"rope_theta": theta} | parameters, "rope_scaling": scaling}
