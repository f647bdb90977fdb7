"""Rotating a part of each head, as two halves (Phi) or as neighbours (GLM): every backend equals transformers."""

import pytest
import torch
from torch import Tensor
from transformers import Glm4Config, Phi3Config
from transformers.models.glm4 import modeling_glm4
from transformers.models.phi3 import modeling_phi3

from nanovllm.attention.backend import CacheShape, LayerAttention
from nanovllm.attention.interface import AttentionBackend
from nanovllm.attention.rotation import rotary_table
from nanovllm.layers.stored_spec import head_order
from nanovllm.models.partial_rope import read_partial_rope
from tests.attention.test_backends import (
    BACKENDS,
    BLOCK_SIZE,
    DEVICE,
    HEAD_DIM,
    NUM_BLOCKS,
    SCALE,
    as_int32,
    block_tables_of,
    geometry_of,
    plain_attention,
)

HEADS, KV_HEADS, LENGTH = 6, 2, 37
SHAPE = {"hidden_size": HEADS * HEAD_DIM, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
ROPE = {"rope_type": "default", "rope_theta": 100.0}


def rotated_by_reference(q: Tensor, k: Tensor, share: float, interleaved: bool) -> tuple[Tensor, Tensor]:
    """[length, heads, head_dim] of positions 0, 1, ..."""
    settings = {**SHAPE, "rope_parameters": ROPE | {"partial_rotary_factor": share}}
    if interleaved:
        embedding = modeling_glm4.Glm4RotaryEmbedding(Glm4Config(**settings, head_dim=HEAD_DIM))
        apply = modeling_glm4.apply_rotary_pos_emb
    else:
        embedding = modeling_phi3.Phi3RotaryEmbedding(Phi3Config(**settings))
        apply = modeling_phi3.apply_rotary_pos_emb
    cos, sin = embedding(q, torch.arange(len(q))[None])
    rotated = apply(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    return rotated[0][0].transpose(0, 1), rotated[1][0].transpose(0, 1)


@pytest.mark.parametrize("backend_name", BACKENDS)
@pytest.mark.parametrize(("share", "interleaved"), [(0.75, False), (0.5, True), (1.0, True), (0.25, False)])
@torch.inference_mode()
def test_equals_transformers(backend_name: str, share: float, interleaved: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(LENGTH, HEADS, HEAD_DIM, generator=generator)
    k, v = torch.randn(2, LENGTH, KV_HEADS, HEAD_DIM, generator=generator)
    expected = plain_attention(*rotated_by_reference(q, k, share, interleaved), v, None)

    raw = {"rope_parameters": ROPE, "partial_rotary_factor": share}
    rope = read_partial_rope(raw, head_dim=HEAD_DIM, max_position=64, share=1.0)
    order = list(head_order(HEAD_DIM, rope.rotated_dim or HEAD_DIM, interleaved=interleaved))
    shape = CacheShape(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        block_size=BLOCK_SIZE,
        windows=(None,),
        dtype=torch.float32,
        cache_dtype=torch.float32,
        device=torch.device(DEVICE),
    )
    table = rotary_table(rope, head_dim=HEAD_DIM, max_position=64, device=shape.device)
    backend: AttentionBackend = BACKENDS[backend_name](shape, [table])
    (cache,) = backend.make_cache({None: NUM_BLOCKS})
    qkv = torch.cat([q[..., order], k[..., order], v], dim=1).to(DEVICE)
    tables = block_tables_of([(0, LENGTH)])
    out = []
    for start, new in ((0, 30), (30, LENGTH - 31), (LENGTH - 1, 1)):  # a prompt in two chunks, a decode
        step = backend.prepare(geometry_of([(start, new)], tables, None), as_int32)
        out.append(backend.forward(qkv[start : start + new], LayerAttention(scale=SCALE), cache, step))
    torch.testing.assert_close(torch.cat(out).cpu(), expected, atol=1e-5, rtol=1e-5)
