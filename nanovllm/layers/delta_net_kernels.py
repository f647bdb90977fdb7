"""The gated delta net with our kernels, between a layer's projections.

Sequences that decode, and all with few new tokens, are computed token by token in three launches: convolution, delta
rule, norm. Longer chunks of prompts take five: two of the convolution, two of the chunks, and the norm. With
`deterministic` all is computed token by token.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from nanovllm.kernels.delta_net.causal_conv import causal_conv
from nanovllm.kernels.delta_net.chunk_factors import chunk_factors
from nanovllm.kernels.delta_net.chunk_states import chunk_states
from nanovllm.kernels.delta_net.head_norm import norm_heads
from nanovllm.kernels.delta_net.recurrent import recurrent
from nanovllm.kernels.delta_net.weights import DeltaNetShape, DeltaNetWeights
from nanovllm.layers.sequences import Sequences

if TYPE_CHECKING:
    from nanovllm.layers.delta_net_spec import DeltaNetSpec


class DeltaNetKernels:
    def __init__(self, own: "DeltaNetSpec", held: Mapping[str, Tensor], *, deterministic: bool, pdl: bool) -> None:
        """`own`: with the heads of this rank. `held`: the layer's weights by name, without those of linears."""
        self._shape = DeltaNetShape(
            own.num_key_heads, own.num_value_heads, own.key_dim, own.value_dim, own.kernel_size, own.norm_eps
        )
        self._weights = DeltaNetWeights(*(held[name] for name in DeltaNetWeights._fields))
        self._deterministic, self._pdl = deterministic, pdl

    def __call__(self, inputs: Tensor, gates: Tensor, state: Tensor, sequences: Sequences) -> Tensor:
        """`inputs`: [num_tokens, channels + z]. `gates`: [num_tokens, 2 * value_heads]. `state`: [rows, size]."""
        shape, weights, pdl = self._shape, self._weights, self._pdl
        out = inputs.new_empty(len(inputs), shape.value_heads * shape.value_dim)
        # deterministic: one kernel computes a token, whatever the others of the step are
        few = not self._deterministic and sequences.have_few_tokens
        kept = state[:, : (shape.kernel_size - 1) * shape.channels].unflatten(1, (-1, shape.channels))
        x, z = inputs[:, : shape.channels], inputs[:, shape.channels :]
        x = causal_conv(x, weights.conv, None, kept, sequences, silu=True, few=few, pdl=pdl)
        num_by_token = len(sequences.rows)
        if not self._deterministic and not few:
            num_by_token -= len(sequences.chunk_sizes)
        if num_by_token:
            recurrent(x, gates, weights, state, sequences, shape, out=out, num_seqs=num_by_token, pdl=pdl)
        if num_by_token < len(sequences.rows):
            assert sequences.chunks is not None and sequences.first_chunks is not None
            found = chunk_factors(x, gates, weights, sequences.chunks, sequences, shape, pdl=pdl)
            first_chunks = sequences.first_chunks
            chunk_states(x, found, first_chunks, state, sequences, shape, out=out, skip=num_by_token, pdl=pdl)
        norm_heads(out, z, weights.norm, shape.eps, pdl=pdl)
        return out
