"""Attention of long prompts on Hopper: compared to plain torch on such a GPU; elsewhere only compiled for one."""

from pathlib import Path

import pytest
import torch

from nanovllm.kernels.features import gluon_usable
from tests.kernels.hopper import Compiled, compile_for_hopper
from tests.kernels.test_prefill_attention import LONG, UNEVEN, UNTOUCHED, Chunk, Memory, Model, attend, random_qkv

COMPILE = """
from nanovllm.kernels.attention import long_prefill

def empty(*shape, dtype=torch.int32): return torch.empty(shape, dtype=dtype)

long_prefill.launch = compile
for window in (None, 4096):
    long_prefill.long_prefill(
        empty(64, 48, 128, dtype=torch.bfloat16), empty(2, 16, 8, 32, 128, dtype=torch.bfloat16),
        q_norm=empty(128, dtype=torch.bfloat16), eps=1e-6, cos_sin=empty(64, 128, dtype=torch.float32),
        chunk_rows=empty(1), chunk_starts=empty(1), chunk_first_tokens=empty(1), chunk_num_new=empty(1),
        tiles=empty(2, 2), blocks=empty(4, 16), num_heads=32, num_kv_heads=8, window=window, scale=0.1,
        out=empty(64, 4096, dtype=torch.bfloat16),
    )
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    assert found == [Compiled("_long_prefill_kernel", 2, ("wgmma", "cp.async.bulk.tensor"))] * 2


LONG_CHUNKS = [Chunk(1, 0, 700), Chunk(2, 127, 129), Chunk(3, 128, 128), Chunk(4, 1000, 31), Chunk(5, 255, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 50, 128, 300])
@pytest.mark.parametrize(("heads", "kv_heads", "block_size"), [(4, 4, 32), (8, 2, 32), (5, 1, 16), (16, 1, 128)])
def test_against_reference(heads: int, kv_heads: int, block_size: int, window: int | None, dtype: torch.dtype) -> None:
    if not gluon_usable():
        pytest.skip("needs a GPU of the kind the kernel is written for")
    torch.manual_seed(0)
    model = Model(heads, kv_heads, 128, block_size, dtype, dtype, window, normed=heads != 5)
    for chunks in (UNEVEN, LONG_CHUNKS):
        lengths = [chunk.start + chunk.num_new for chunk in chunks]
        seen = [0 if window is None else max(0, chunk.start - window + 1) for chunk in chunks]
        memory = Memory.of(model, lengths, seen)  # NaN wherever nothing may be read
        num_tokens = sum(chunk.num_new for chunk in chunks)
        qkv = random_qkv(model, num_tokens + 3)
        out = attend(model, memory, chunks, qkv, LONG)
        expected = attend(model, memory.without_nan(), chunks, qkv, None)
        assert (out[num_tokens:] == UNTOUCHED).all()
        tolerance = 1.6e-2 if dtype == torch.bfloat16 else 2e-3
        torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
        assert torch.equal(out, attend(model, memory, chunks, qkv, LONG)), "not the same when run again"
