"""OLMo 2 and 3: norms after the parts of a layer, norms of queries and keys over all heads; OLMo 3 has windows."""

from dataclasses import replace
from typing import Any

from nanovllm.layers.refine import refine
from nanovllm.layers.spec import AttentionSpec
from nanovllm.layers.wide_norm_spec import WideNormAttentionSpec
from nanovllm.models.changes import change_attention
from nanovllm.models.known_values import check_known
from nanovllm.models.layer_kinds import FULL, SLIDING, attention_kinds
from nanovllm.models.post_norm_spec import PostNormLayerSpec
from nanovllm.models.spec import ModelSpec, llama_shaped, read_rope

DEFAULTS: dict[str, dict[str, Any]] = {  # which files may leave out
    "Olmo2ForCausalLM": {"rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "sliding_window": 4096},
}


def spec(raw: dict[str, Any]) -> ModelSpec:
    architecture = raw["architectures"][0]
    raw = DEFAULTS[architecture] | raw
    check_known(raw, {"clip_qkv": (None,)})
    bias = bool(raw.get("attention_bias", False))
    kinds = attention_kinds(raw, full_every=4) if architecture == "Olmo3ForCausalLM" else []
    windows = [raw["sliding_window"] if kind == SLIDING else None for kind in kinds]
    model = llama_shaped(raw, qkv_bias=bias, o_bias=bias, windows=windows or None)

    def attention(index: int, own: AttentionSpec) -> WideNormAttentionSpec:
        if kinds:
            rope = read_rope(_rope_of(raw, kinds[index]), head_dim=own.head_dim, max_position=model.max_position)
            own = replace(own, rope=rope)
        return refine(WideNormAttentionSpec, own, wide_norm_eps=model.norm_eps)

    changed = change_attention(model, attention)
    return replace(changed, layers=tuple(map(PostNormLayerSpec.of, changed.layers)))


def _rope_of(raw: dict[str, Any], kind: str) -> dict[str, Any]:
    """The config with the rotary positions of one kind of layers. In older files only full attention is scaled."""
    parameters = raw.get("rope_parameters") or {}
    if kind in parameters:
        return raw | {"rope_parameters": parameters[kind]}
    return raw if kind == FULL else raw | {"rope_scaling": None}
