"""Rotary frequencies and rotation equal those of transformers, for the sizes of real models."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from nanovllm.attention.backend import CacheShape
from nanovllm.attention.rope_scaling import scaled_frequencies
from nanovllm.attention.rotation import Rotation, rotary_table, rotate
from nanovllm.layers.spec import RopeSpec
from nanovllm.models.spec import read_rope

LLAMA_3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500000.0}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e6},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    "Llama-3.2-1B": {**LLAMA_3, "factor": 32.0, "original_max_position_embeddings": 8192},
    "Llama-3.1-8B": {**LLAMA_3, "factor": 8.0, "original_max_position_embeddings": 8192},
    "Qwen3 with YaRN": YARN,
    "yarn, stated amplitude": {**YARN, "attention_factor": 1.25},
    "yarn, two scales": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, one scale counts as none": {**YARN, "mscale": 0.5, "mscale_all_dim": 0},
    "yarn, other bounds": {**YARN, "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False},
    "yarn, bounds that meet": {**YARN, "beta_fast": 1.0, "truncate": False},
    "yarn, original length not stated": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0},
}
MAX_POSITION = 131072  # that configs state
POSITIONS = torch.tensor([0, 1, 17, 1000, 4095])


def table_of(rope: RopeSpec, head_dim: int, max_position: int = 4096) -> Tensor:
    return rotary_table(rope, head_dim=head_dim, max_position=max_position, device=torch.device("cpu"))


def reference_of(parameters: dict[str, Any], head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_POSITION,
        rope_parameters=dict(parameters),
    )
    return LlamaRotaryEmbedding(config)


def assert_tables_equal(table: Tensor, theirs: LlamaRotaryEmbedding, positions: Tensor) -> None:
    cos, sin = (part[0].chunk(2, dim=-1)[0] for part in theirs(table, positions[None]))
    torch.testing.assert_close(table[positions], torch.cat([cos, sin], dim=-1), atol=1e-3, rtol=0)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("name", ROPES)
def test_equals_transformers(name: str, head_dim: int) -> None:
    theirs = reference_of(ROPES[name], head_dim)
    rope = read_rope({"rope_parameters": ROPES[name]}, head_dim=head_dim, max_position=MAX_POSITION)
    table = table_of(rope, head_dim)
    assert_tables_equal(table, theirs, POSITIONS)
    if rope.scaling is not None:
        default = 1.0 / rope.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        frequencies, amplitude = scaled_frequencies(default, rope, max_position=4096)
        torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
        assert amplitude == pytest.approx(theirs.attention_scaling)

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
    qkv = torch.randn(5, 8, head_dim, generator=torch.Generator().manual_seed(0))
    q, k, v = qkv.split([4, 2, 2], dim=1)
    cos, sin = theirs(qkv, POSITIONS[None])
    their_q, their_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    expected = torch.cat([their_q[0].transpose(0, 1), their_k[0].transpose(0, 1), v], dim=1)
    torch.testing.assert_close(rotate(qkv, Rotation(shape, table).gather(POSITIONS)), expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("stated", [{}, {"factor": 8.0}, {"attention_factor": 1.5}])
def test_longrope_has_one_list_of_factors_for_all_sequences(stated: dict[str, Any]) -> None:
    """The short ones while no sequence can pass the original length; else the long ones, also in short sequences."""
    parameters = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + i / 32 for i in range(32)],
        "long_factor": [2.0 + i for i in range(32)],
        **stated,
    }
    rope = read_rope({"rope_parameters": parameters}, head_dim=64, max_position=MAX_POSITION)
    theirs = reference_of(parameters, 64)
    assert_tables_equal(table_of(rope, 64, max_position=4096), theirs, POSITIONS)
    longer = torch.cat([POSITIONS, torch.tensor([4096])])  # makes transformers use the long factors for all of them
    assert_tables_equal(table_of(rope, 64, max_position=4097), theirs, longer)
