"""Rotary frequencies and rotation equal those of transformers, for the sizes of real models."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanovllm.attention.backend import CacheShape
from nanovllm.attention.rotation import Rotation, inverse_frequencies, rotary_table, rotate
from nanovllm.models.spec import read_rope

LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "Llama-3.2-1B": {**LLAMA_3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "Llama-3.1-8B": {**LLAMA_3, "factor": 8.0, "original_max_position_embeddings": 8192},
}


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_equals_transformers(name: str, head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rope_parameters=dict(ROPES[name]),
    )
    theirs = LlamaRotaryEmbedding(config)
    rope = read_rope({"rope_parameters": ROPES[name]}, max_position=131072)
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), theirs.inv_freq, rtol=1e-6, atol=0)

    positions = torch.tensor([0, 1, 17, 1000, 4095])
    shape = CacheShape(
        num_heads=4,
        num_kv_heads=2,
        head_dim=head_dim,
        block_size=16,
        windows=(None,),
        dtype=torch.float32,
        cache_dtype=torch.float32,
        device=torch.device("cpu"),
    )
    ours = Rotation(shape, rotary_table(rope, head_dim=head_dim, max_position=4096, device=shape.device))
    qkv = torch.randn(5, 8, head_dim, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.split([4, 2, 2], dim=1)
    cos, sin = theirs(qkv, positions[None])
    their_q, their_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    expected = torch.cat([their_q[0].transpose(0, 1), their_k[0].transpose(0, 1), v], dim=1)
    torch.testing.assert_close(rotate(qkv, ours.gather(positions)), expected, atol=1e-3, rtol=0)
