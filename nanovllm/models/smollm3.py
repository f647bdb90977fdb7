"""SmolLM3: the plain shape, in which some layers do not rotate queries and keys."""

import math
from dataclasses import replace
from typing import Any

from nanovllm.layers.rope_spec import LinearScaling
from nanovllm.layers.spec import RopeSpec
from nanovllm.models.changes import change_attention
from nanovllm.models.layer_kinds import FULL, SLIDING
from nanovllm.models.qwen2 import layer_windows
from nanovllm.models.spec import ModelSpec, count, llama_shaped

DEFAULTS: dict[str, Any] = {  # which files may leave out
    "num_key_value_heads": 4,
    "rope_theta": 2_000_000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
}
NO_ROPE = RopeSpec(theta=10000.0, scaling=LinearScaling(math.inf))  # every angle is 0


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = DEFAULTS | raw
    num_layers, interval = count(raw, "num_hidden_layers"), raw.get("no_rope_layer_interval", 4)
    rotates = raw.get("no_rope_layers") or [(index + 1) % interval != 0 for index in range(num_layers)]
    if raw.get("layer_types") is None:  # then windows are in the layers without rotary positions
        raw["layer_types"] = [FULL if rotates[index] else SLIDING for index in range(num_layers)]
    bias, mlp_bias = bool(raw.get("attention_bias", False)), bool(raw.get("mlp_bias", False))
    model = llama_shaped(raw, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias, windows=layer_windows(raw))
    return change_attention(model, lambda index, own: own if rotates[index] else replace(own, rope=NO_ROPE))
