"""The kernels for packed weights compile for Hopper, and use its instructions where they should."""

from collections import Counter
from pathlib import Path

from tests.kernels.hopper import compile_for_hopper

COMPILE = """
from nanovllm.kernels.linear import fp8_inputs, packed_dequantize, packed_rows, packed_tiled
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.moe import grouped, packed, packed_rows as expert_rows
from nanovllm.kernels.moe.experts import experts_forward

for module in (expert_rows, fp8_inputs, grouped, packed, packed_dequantize, packed_rows, packed_tiled):
    module.launch = compile
fp8_inputs._device_limits = packed_tiled._device_limits = lambda: (132, 232_448)

def weight(kind, bits, group, scale, *experts, **tensors):
    words = torch.empty(*experts, 256, 512 * bits // 32, dtype=torch.int32)
    scales = torch.empty(*experts, 256 // tensors.get("scale_rows", 1), 512 // group, dtype=scale)
    return PackedWords(kind, min(64, group), words, scales, **tensors)

def x(rows):
    return torch.empty(rows, 512, dtype=torch.bfloat16)

int4 = weight("int4", 4, 128, torch.float16, zero=torch.empty(256, 4, dtype=torch.uint8))
fp8 = weight("fp8", 8, 128, torch.float32, scale_rows=128, rounds_inputs=True)
packed_rows.packed_rows_linear(x(1), int4, norm_weight=x(1)[0], eps=1e-6, gated=True, pdl=True)
packed_rows.packed_rows_linear(x(8), fp8, pdl=True)
packed_tiled.packed_tiled_linear(x(64), int4, gated=True, pdl=True)
packed_dequantize.packed_dequantize(int4, torch.bfloat16, pdl=True)
fp8_inputs.fp8_linear(x(64), fp8, gated=True, pdl=True)
mxfp4 = weight("fp4", 4, 32, torch.uint8, 8)
choices = torch.empty(16, 2, dtype=torch.int32)
down = PackedWords("fp4", 32, torch.empty(8, 512, 16, dtype=torch.int32), torch.empty(8, 512, 4, dtype=torch.uint8))
for tokens in (1, 16):
    routing = torch.empty(tokens, 2, dtype=torch.bfloat16), choices[:tokens]
    experts_forward(x(tokens), mxfp4, down, *routing, pdl=True)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    tiles = {"_packed_tiled_kernel": 1, "_packed_experts_kernel": 2, "_fp8_kernel": 1}
    others = {"_packed_rows_kernel": 2, "_packed_dequantize_kernel": 1, "_round_inputs_kernel": 1}
    others |= {"_packed_expert_rows_kernel": 2, "_group_kernel": 1, "_sum_kernel": 1}
    assert Counter(one.kernel for one in found) == tiles | others
    assert all(("wgmma" in one.instructions) == (one.kernel in tiles) for one in found)
