"""Settings that several tiny models of tests/helpers.py share."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,  # small, so that the scaling affects short prompts
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MINISTRAL_ROPE = {
    **YARN_ROPE,
    "factor": 32.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.5,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,  # of 16
    "short_factor": [1.0 + i / 8 for i in range(6)],
    "long_factor": [2.0 + i for i in range(6)],
}
GRANITE = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.25,
}
MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 12, "swiglu_limit": 1.5}
SHARED_MOE = {**MOE, "shared_expert_intermediate_size": 32}
DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
WIDE_NET = {**DELTA_NET, "linear_key_head_dim": 16, "linear_value_head_dim": 32}
DEEPSEEK = {
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,  # head_dim
    "v_head_dim": 20,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
EXPERT_GROUPS = {"q_lora_rank": 20, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
DEEPSEEK_ROPE = {**YARN_ROPE, "mscale": 0.707, "mscale_all_dim": 1.2}
