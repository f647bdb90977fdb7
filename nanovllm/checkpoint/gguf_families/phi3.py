"""Phi-3, Phi-4 and Phi-4-mini: query, key and value in one tensor, and gate and up; longrope's factors as tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    """A window of 0 is none. The window of other files is used as in transformers; llama.cpp does not."""
    has_window = bool(file.get("attention.sliding_window"))
    return {
        "sliding_window": file.count("attention.sliding_window") if has_window else None,
        "original_max_position_embeddings": file.count(
            "rope.scaling.original_context_length", default=plain["max_position_embeddings"]
        ),
    }


NAMES = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
FAMILIES = {
    "phi3": GGUFFamily(hf_class="Phi3ForCausalLM", model_type="phi3", names=NAMES, partial_rotary=True, config=_config)
}
