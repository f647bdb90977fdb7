"""Settings of tiny Gemma 4 models for tests/helpers.py."""

from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 500.0},
    FULL: {"rope_type": "proportional", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
ALL = {"sliding_window": 12, "global_head_dim": 32, "final_logit_softcapping": 20.0}
DENSE: dict[str, Any] = {
    **ALL,
    "layer_types": [SLIDING, SLIDING, FULL],
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
}
UNIFIED: dict[str, Any] = {name: value for name, value in DENSE.items() if name != "hidden_size_per_layer_input"}
PER_LAYER: dict[str, Any] = {
    **ALL,
    "num_hidden_layers": 5,  # the last two read the keys and values of the third and the second
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 160,
}
PER_LAYER_8 = PER_LAYER | {  # of whose two stages the second has all layers that share keys and values
    "num_hidden_layers": 8,
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING, FULL],
}
EXPERTS: dict[str, Any] = {
    **DENSE,
    "layer_types": [SLIDING, FULL, FULL],
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
