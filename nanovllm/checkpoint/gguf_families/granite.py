"""Granite (dense): four scalars, of which all but that of the logits may be missing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    if file.get("rope.scaling.finetuned") is False:
        raise file.refuse("metadata rope.scaling.finetuned is false; a Granite model without RoPE is not supported")
    return {
        "logits_scaling": file.real("logit_scale"),
        "residual_multiplier": file.real("residual_scale", default=1.0),
        "embedding_multiplier": file.real("embedding_scale", default=1.0),
        "attention_multiplier": file.real("attention.scale", default=plain["head_dim"] ** -0.5),
    }


FAMILIES = {"granite": GGUFFamily(hf_class="GraniteForCausalLM", model_type="granite", permuted=True, config=_config)}
