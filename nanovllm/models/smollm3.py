"""SmolLM3: the plain shape, in which some layers do not rotate queries and keys."""

import math
from dataclasses import replace
from typing import Any

from nanovllm.layers.rope_spec import LinearScaling
from nanovllm.layers.spec import RopeSpec
from nanovllm.models.changes import change_attention
from nanovllm.models.qwen2 import layer_windows
from nanovllm.models.spec import ModelSpec, llama_shaped

NO_ROPE = RopeSpec(theta=10000.0, scaling=LinearScaling(math.inf))  # every angle is 0


def spec(raw: dict[str, Any]) -> ModelSpec:
    bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    model = llama_shaped(raw, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, windows=layer_windows(raw))
    interval = raw.get("no_rope_layer_interval", 4)
    rotates = raw.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(model.num_layers)]
    return change_attention(model, lambda index, own: own if rotates[index] else replace(own, rope=NO_ROPE))
