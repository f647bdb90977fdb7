"""Mistral: Llama with a sliding window in every layer, unless the config says null. Ministral 3 scales queries by their
position. Files that have a vision tower as well keep the config of the text model in a part of theirs."""

from typing import Any

from nanovllm.layers.query_scale_spec import ScaledQueryAttentionSpec
from nanovllm.layers.refine import refine
from nanovllm.models.changes import change_attention
from nanovllm.models.partial_rope import check_rope_is_stated
from nanovllm.models.spec import ModelSpec, llama_shaped
from nanovllm.models.text_part import text_part

MISTRAL: dict[str, Any] = {"sliding_window": 4096, "num_key_value_heads": 8}  # what configs may leave out
MINISTRAL3: dict[str, Any] = {"sliding_window": None, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "head_dim": 128}


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = text_part(raw, known=("mistral", "ministral3"))
    if raw.get("model_type") == "ministral3" or raw["architectures"][0] == "Ministral3ForCausalLM":
        raw = MINISTRAL3 | raw
        check_rope_is_stated(raw)
    raw = MISTRAL | raw
    model = llama_shaped(raw, windows=(raw["sliding_window"],) * raw["num_hidden_layers"])
    rope = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    beta = rope.get("llama_4_scaling_beta")
    if not beta:
        return model
    scaling = {"beta": float(beta), "original_length": int(rope["original_max_position_embeddings"])}
    return change_attention(
        model,
        lambda _, own: refine(ScaledQueryAttentionSpec, own, max_position=model.max_position, **scaling),
    )
