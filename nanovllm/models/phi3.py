"""Phi-3, Phi-4 and Phi-4-mini: the plain shape, with query, key and value stored as one tensor, and gate and up."""

from typing import Any

from nanovllm.models.changes import change_storage
from nanovllm.models.known_values import check_known
from nanovllm.models.partial_rope import without_rope
from nanovllm.models.spec import ModelSpec, llama_shaped

KNOWN = {"attention_bias": (False,), "mlp_bias": (False,), "lm_head_bias": (False,), "full_attn_mod": (1,)}


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, **raw}
    check_known(raw, KNOWN)
    for place in ("rope_parameters", "rope_scaling"):
        if rope := raw.get(place):
            raw[place] = rope = {**rope, "original_max_position_embeddings": raw["original_max_position_embeddings"]}
            if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):  # earlier names of longrope
                rope["rope_type"] = "longrope"
    window = raw.get("sliding_window")
    if window and window >= raw["max_position_embeddings"]:  # Phi-4-mini's
        window = None
    model = llama_shaped(without_rope(raw), windows=(window,) * raw["num_hidden_layers"])
    return change_storage(model, raw, rotated_share=1.0, qkv_as_one=True)
