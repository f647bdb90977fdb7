"""GLM-4 0414: a part of each head is rotated, norms after each part of a layer, gate and up in one tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    if any(file.per_layer("rope.dimension_sections") or ()):
        raise file.refuse("metadata rope.dimension_sections: positions of images are not supported")
    return {}


NAMES = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_up": "mlp.gate_up_proj",
}
FAMILIES = {
    "glm4": GGUFFamily(hf_class="Glm4ForCausalLM", model_type="glm4", names=NAMES, partial_rotary=True, config=_config)
}
