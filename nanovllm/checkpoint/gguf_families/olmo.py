"""OLMo 2 and, with windows, OLMo 3: norms after the parts of a layer, which have none before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily, layer_types, windowed_layers

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    """Rotary positions of layers with windows are not scaled."""
    if not file.get("attention.sliding_window"):
        return {}
    theta = plain["rope_theta"]
    return {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "sliding_window": file.count("attention.sliding_window"),
        "layer_types": layer_types(windowed_layers(file, plain["num_hidden_layers"], period=4)),
        "rope_scaling": None,
        "rope_parameters": {
            "sliding_attention": {"rope_theta": file.real("rope.freq_base_swa", default=theta)},
            "full_attention": {"rope_theta": theta, **(plain["rope_scaling"] or {})},
        },
    }


NAMES = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
FAMILIES = {"olmo2": GGUFFamily(hf_class="Olmo2ForCausalLM", model_type="olmo2", names=NAMES, config=_config)}
