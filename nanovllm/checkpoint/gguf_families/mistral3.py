"""Ministral 3 and Mistral Small 3: YaRN, and queries that are scaled by their position, both optional."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile

QUERY_SCALE = "attention.temperature_scale"


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    if file.get("attention.sliding_window"):
        raise file.refuse("metadata attention.sliding_window: llama.cpp computes no windows for mistral3")
    if not file.get(QUERY_SCALE):
        return {}
    scaling = plain["rope_scaling"] or {}
    if scaling.get("rope_type") != "yarn":
        raise file.refuse(f"metadata {QUERY_SCALE} needs rope.scaling.type yarn, whose original context length it uses")
    return {"rope_scaling": scaling | {"llama_4_scaling_beta": file.real(QUERY_SCALE)}}


FAMILIES = {
    "mistral3": GGUFFamily(hf_class="Ministral3ForCausalLM", model_type="ministral3", permuted=True, config=_config)
}
