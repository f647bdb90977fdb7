"""Llama, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile


def _mistral(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    """A Llama model with a window is a Mistral one."""
    if file.get("attention.sliding_window") is None:
        return {}
    return {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": file.count("attention.sliding_window"),
    }


FAMILIES = {
    "llama": GGUFFamily(hf_class="LlamaForCausalLM", model_type="llama", permuted=True, config=_mistral),
    "qwen2": GGUFFamily(hf_class="Qwen2ForCausalLM", model_type="qwen2"),
    "qwen3": GGUFFamily(hf_class="Qwen3ForCausalLM", model_type="qwen3"),
}
