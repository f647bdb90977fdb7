"""The kernels that know sinks compile for Hopper, in the shapes of gpt-oss-20b."""

from pathlib import Path

from tests.kernels.hopper import compile_for_hopper

COMPILE = """
from nanovllm.kernels.attention import decode, prefill, small_batch
from nanovllm.kernels.attention.decode_plan import DecodeConfig
from nanovllm.kernels.attention.decode_workspace import DecodeWorkspace

for module in (decode, prefill, small_batch):
    module.launch = compile
half, count = dict(dtype=torch.bfloat16), dict(dtype=torch.int32)
qkv, cache, out = torch.empty(4, 80, 64, **half), torch.empty(2, 9, 8, 32, 64, **half), torch.empty(4, 4096, **half)
row, table = torch.empty(4, **count), torch.empty(4, 8, **count)
workspace = DecodeWorkspace(max_batch=4, max_programs=64, heads=64, kv_heads=8, head_dim=64, device="cpu")
shared = dict(eps=1e-6, cos_sin=torch.empty(99, 64), scale=0.125, sinks=torch.empty(64, **half), out=out, pdl=True)
new = dict(positions=row, workspace=workspace, q_norm=None, k_norm=None, **shared)
config = DecodeConfig(64, 32, num_warps=4, num_stages=2, splits=1)
decode.paged_decode(qkv, cache, None, rows=row, blocks=table, prefix=None, window=128, config=config, **new)
chunks = {f"chunk_{name}": row for name in ("rows", "starts", "first_tokens", "num_new")}
chunks |= dict(q_norm=None, tiles=torch.empty(4, 2, **count), blocks=table, num_heads=64, num_kv_heads=8)
config = prefill.prefill_config(head_dim=64, group=8, dtype=torch.bfloat16, cache_dtype=torch.bfloat16)
prefill.paged_prefill(qkv, cache, None, **chunks, window=128, config=config, **shared)
small_batch.small_batch_decode(qkv, cache, tables=table, config=small_batch.SmallBatchConfig(4), window=128, **new)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    assert len(compile_for_hopper(COMPILE, tmp_path)) == 3
