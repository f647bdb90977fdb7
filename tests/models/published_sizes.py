"""Of the configs in published.py: numbers of parameters, and what makes a tiny model of one.

A prompt of a hundred tokens is longer than the windows of a tiny model, and than the length it was trained for first.
tests/helpers.py has families like those that are not here.
"""

from typing import Any

from tests.models.published import FULL, LINEAR, SLIDING, YARN

NUM_PARAMETERS = {  # as Hugging Face's pages of the checkpoints state them
    "SmolLM3-3B": 3_075_098_624,
    "Qwen3-8B with YaRN": 8_190_735_360,
    "Phi-4": 14_659_507_200,
    "Phi-4-mini": 3_836_021_760,
    "OLMo-2-1B": 1_484_916_736,
    "Olmo-3-7B": 7_298_011_136,
    "GLM-4-9B-0414": 9_400_279_040,
    "Granite-4.0-micro": 3_402_836_480,
    "gemma-3-270m": 268_098_176,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "LFM2-1.2B": 1_170_340_608,
    "Qwen3-Next-80B-A3B with YaRN": 79_674_391_296,
    "DeepSeek-V2-Lite": 15_706_484_224,
}

TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
}
SMALL_YARN = YARN | {"original_max_position_embeddings": 32}
SMALL: dict[str, dict[str, Any]] = {
    "SmolLM3-3B": {"no_rope_layers": [1, 1, 1, 0], "layer_types": [FULL] * 4},
    "Qwen3-8B with YaRN": {"head_dim": 32, "max_position_embeddings": 32, "rope_scaling": SMALL_YARN},
    "Devstral-2-123B": {"head_dim": 16},
    "Phi-4": {"original_max_position_embeddings": 128},
    "Phi-4-mini": {
        "original_max_position_embeddings": 48,
        "rope_scaling": {
            "long_factor": [1.0 + i for i in range(6)],
            "short_factor": [50.0] * 6,
            "type": "longrope",
        },
    },
    "Granite-4.0-micro": {
        "attention_multiplier": 0.25,
        "logits_scaling": 0.25,
        "layer_types": ["attention"] * 4,
        "mamba_d_head": 16,
        "mamba_n_heads": 8,
        "shared_intermediate_size": 80,
    },
    "Olmo-3-7B": {"layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 20, "num_key_value_heads": 4},
    "GLM-Z1-32B-0414 with YaRN": {"head_dim": 16, "rope_scaling": SMALL_YARN, "max_position_embeddings": 32},
    "gemma-3-270m": {"head_dim": 16, "sliding_window": 20, "layer_types": [SLIDING, SLIDING, SLIDING, FULL]},
    "gemma-3-1b": {"head_dim": 16, "sliding_window": 20, "num_hidden_layers": 7},
    "gpt-oss-20b": {
        "head_dim": 16,
        "layer_types": [SLIDING, FULL] * 2,
        "num_local_experts": 6,
        "sliding_window": 20,
        "swiglu_limit": 1.5,
    },
    "LFM2-1.2B": {"block_ff_dim": 96, "block_multiple_of": 16, "full_attn_idxs": [1, 3]},
    "Qwen3-Next-80B-A3B with YaRN": {
        "head_dim": 32,
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 32,
        "moe_intermediate_size": 24,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "rope_scaling": SMALL_YARN,
        "shared_expert_intermediate_size": 32,
    },
    "Qwen3.6-27B": {
        "head_dim": 32,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
        "linear_key_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_value_head_dim": 16,
    },
    "DeepSeek-V2-Lite": {
        "kv_lora_rank": 24,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16,
        "v_head_dim": 20,
    },
    "GLM-4.7-Flash": {
        "kv_lora_rank": 24,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16,
        "v_head_dim": 28,
    },
}
