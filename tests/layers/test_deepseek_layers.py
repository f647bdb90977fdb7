"""Latent attention and experts chosen in groups: the same numbers with kernels as with plain operations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.attention.backend import CacheShape
from nanovllm.attention.interface import Lengths
from nanovllm.attention.latent import LatentBackend
from nanovllm.attention.latent_kernels import LatentKernelBackend
from nanovllm.attention.rotation import rotary_table
from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from nanovllm.layers.latent_spec import LatentAttentionSpec
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import RopeSpec
from nanovllm.layers.step import Step
from tests.attention.test_backends import as_int32, geometry_of
from tests.kernels.support import DEVICE
from tests.layers.build import context, make_norm

HIDDEN, HALF = 64, torch.float16
EXPERTS = GroupedMoeSpec(
    hidden_size=HIDDEN,
    intermediate_size=32,
    num_experts=8,
    num_experts_per_token=3,
    norm_topk_prob=True,
    shared_size=32,
    shared_name="shared_experts",
    gated=False,
    scoring="sigmoid",
    num_groups=4,
    num_chosen_groups=2,
    scaling=1.8,
)
ATTENTION = LatentAttentionSpec(
    hidden_size=HIDDEN,
    num_heads=4,
    num_kv_heads=1,
    head_dim=48,
    rope=RopeSpec(theta=100.0),
    scale=0.2,
    latent_size=32,
    rotated_size=16,
    plain_size=16,
    value_size=16,
    query_rank=32,
    latent_norm_eps=1e-6,
    interleaved=True,
)
LENGTHS = (40, 1, 17, 30, 2, 20)  # computed before

# from Triton 3.6's interpreter, for a loop whose bound is an argument
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


def with_weights(layer: Any) -> Any:
    torch.manual_seed(0)
    for slot in layer.slots().values():
        slot.load(InMemory(torch.randn(slot.shape) * (0.2 if len(slot.shape) > 1 else 1.0)))
    layer.finish_loading()
    return layer


@pytest.mark.parametrize("num_tokens", [2, 6])
def test_experts(num_tokens: int) -> None:
    x = torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(DEVICE, HALF)
    found = []
    for kernels in (False, True):
        built_with = context(HALF, torch.device(DEVICE), kernels=kernels)
        layer = with_weights(EXPERTS.build(built_with))
        found.append(layer(Residual(x.clone()), norm=make_norm(HIDDEN, built_with)).rows)
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-2)
    assert (found[0] - x).abs().max() > 0.5


@pytest.mark.parametrize("num_tokens", [3, 6])
def test_attention(num_tokens: int) -> None:
    device, size, lengths = torch.device(DEVICE), ATTENTION.latent_size, np.array(LENGTHS[:num_tokens])
    shape = CacheShape(
        num_heads=4,
        num_kv_heads=1,
        head_dim=48,
        block_size=16,
        windows=(None,),
        dtype=HALF,
        cache_dtype=HALF,
        device=device,
    )
    table = rotary_table(ATTENTION.rope, head_dim=16, max_position=64, device=device)
    blocks = np.arange(1, 19).reshape(6, 3)[:num_tokens]
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_tokens, HIDDEN, generator=generator).to(device, HALF)
    cached = torch.randn(19, 16, 48, generator=generator).to(device, HALF)
    found = []
    for kind in (LatentBackend, LatentKernelBackend):
        backend = kind(shape, [table], latent_size=size, plain_size=ATTENTION.plain_size)
        (cache,) = backend.make_cache({None: 19})
        cache.kv.view(cached.shape).copy_(cached)
        kernels = isinstance(backend, LatentKernelBackend)
        built_with = replace(context(HALF, device, kernels=kernels), attention=backend, ropes=(ATTENTION.rope,))
        layer = with_weights(ATTENTION.build(built_with))
        if isinstance(backend, LatentKernelBackend):
            rows, known = as_int32(np.arange(num_tokens)), as_int32(lengths)
            positions = torch.full_like(known, 7)  # of the step before; kernels read them early
            step = backend.decode_step(
                rows, positions, blocks={None: as_int32(blocks)}, lengths=known + 1, kind=Lengths.SIMILAR
            )
        else:
            step = backend.prepare(geometry_of([(length, 1) for length in lengths], blocks, None), as_int32)
        norm = make_norm(HIDDEN, built_with)
        found.append((layer.mix(Residual(x.clone()), cache, Step(step), norm=norm), cache.kv))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)
    assert found[0][0].abs().max() > 0.5
