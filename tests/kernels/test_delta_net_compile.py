"""The kernels of hybrid models compile for Hopper, and multiply chunks with its tensor cores."""

from collections import Counter
from pathlib import Path

from tests.kernels.hopper import compile_for_hopper

COMPILE = """
import numpy as np
from nanovllm.kernels.delta_net import causal_conv, chunk_factors, chunk_states, head_norm, recurrent
from nanovllm.kernels.delta_net.weights import DeltaNetShape, DeltaNetWeights
from nanovllm.layers.sequences import Sequences

for module in (causal_conv, chunk_factors, chunk_states, head_norm, recurrent):
    module.launch = compile

seqs = Sequences.of(
    lambda x: torch.from_numpy(x.astype(np.int32)), *map(np.array, ([1], [0], [0], [64], [0] * 64)), num_decodes=0
)
shape = DeltaNetShape(16, 32, 128, 128, 4, 1e-6)
state = torch.empty(2, 3 * 8192 + 32 * 128 * 128)
gates, out = torch.empty(64, 64, dtype=torch.bfloat16), torch.empty(64, 4096, dtype=torch.bfloat16)
x, conv = torch.empty(64, 8192 + 4096, dtype=torch.bfloat16), torch.empty(8192, 1, 4, dtype=torch.bfloat16)
weights = DeltaNetWeights(conv, torch.empty(32), torch.empty(32), torch.empty(128, dtype=torch.bfloat16))
kept = state[:, : 3 * 8192].unflatten(1, (3, 8192))
y = causal_conv.causal_conv(x[:, :8192], conv, None, kept, seqs, silu=True, pdl=True)
recurrent.recurrent(y, gates, weights, state, seqs, shape, out=out, num_seqs=1, pdl=True)
odd = DeltaNetShape(2, 4, 24, 40, 4, 1e-6)  # keys and values are padded to different sizes
recurrent.recurrent(y, gates, weights, state, seqs, odd, out=out, num_seqs=1, pdl=True)
found = chunk_factors.chunk_factors(y, gates, weights, seqs.chunks, seqs, shape, pdl=True)
for num_sms in (132, 1):
    chunk_states._device_limits = lambda: (num_sms, 232_448)
    chunk_states.chunk_states(y, found, seqs.first_chunks, state, seqs, shape, out=out, skip=0, pdl=True)
head_norm.norm_heads(out, x[:, 8192:], weights.norm, 1e-6, pdl=True)
b, c, h = torch.empty(64, 3 * 2048, dtype=torch.bfloat16).chunk(3, dim=-1)
kept, short = torch.empty(2, 2, 2048), conv[:2048, :, :3].contiguous()
for few in (True, False):
    causal_conv.causal_conv(h, short, None, kept, seqs, times_and_after=(b, c), few=few, pdl=True)
"""


def test_compiles_for_hopper(tmp_path: Path) -> None:
    found = compile_for_hopper(COMPILE, tmp_path)
    products = {"_chunk_factors_kernel": 1, "_chunk_states_kernel": 2}
    others = {"_recurrent_kernel": 2, "_norm_heads_kernel": 1}
    others |= {"_conv_tokens_kernel": 2, "_conv_steps_kernel": 3}
    assert Counter(one.kernel for one in found) == products | others
    assert all(("wgmma" in one.instructions) == (one.kernel in products) for one in found)
