"""GLM-4: neighbours in one half of each head are rotated, gate and up are stored as one tensor; the version 0414
(`Glm4ForCausalLM`) has norms before and after each part of a layer."""

from dataclasses import replace
from typing import Any

from nanovllm.models.changes import change_storage
from nanovllm.models.partial_rope import without_rope
from nanovllm.models.post_norm_spec import SandwichLayerSpec
from nanovllm.models.spec import ModelSpec, llama_shaped


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = {"attention_bias": True, "head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7, **raw}
    model = llama_shaped(without_rope(raw), qkv_bias=bool(raw["attention_bias"]))
    model = change_storage(model, raw, rotated_share=0.5, interleaved=True)
    if model.architecture == "GlmForCausalLM":
        return model
    return replace(model, layers=tuple(map(SandwichLayerSpec.of, model.layers)))
