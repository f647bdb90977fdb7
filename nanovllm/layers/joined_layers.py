"""Steps of a few rows in which everything between two attentions is one kernel (kernels/linear/packed_layer.py).

For models whose layers are attention and a gated feed-forward with packed 4-bit weights, on one GPU.
"""

from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.linear.choose import linear_case
from nanovllm.kernels.linear.layer_events import COUNTERS
from nanovllm.kernels.linear.packed import PackedWords
from nanovllm.kernels.linear.packed_layer import MAX_ROWS, LayerWeights, packed_layer, packed_layer_serves
from nanovllm.kernels.select import joins_layers
from nanovllm.layers.attention import Attention
from nanovllm.layers.context import BuildContext
from nanovllm.layers.linear import Linear
from nanovllm.layers.mlp import MLP
from nanovllm.layers.residual import Residual
from nanovllm.layers.split_k_residual import SplitKResidual
from nanovllm.layers.step import Step


class JoinedLayers:
    def __init__(self, layers: list[Any], context: BuildContext) -> None:
        self._layers, self._context = layers, context
        self._serves: bool | None = None  # known when the first step comes: weights are loaded then
        # on which the programs of a launch wait for each other; launches of a stream come one after the other
        self._counters = torch.zeros(COUNTERS, dtype=torch.int64, device=context.device)

    def __call__(self, x: Tensor, layers: list[tuple[Any, Any]], step: Step) -> Tensor | None:
        """Run these (layer, state) on x, [num_tokens, hidden], which may be overwritten. Returns None if the kernel
        does not serve this step."""
        if x.shape[0] > MAX_ROWS or not layers:
            return None
        if self._serves is None:
            self._serves = self._all_served()
            if self._serves:
                self._launch_linears()
        if not self._serves:
            return None
        first = layers[0][0]
        qkv: Tensor | None = first.mixer.qkv_proj(Residual(x), norm=first.input_norm)
        for index, (layer, state) in enumerate(layers):
            assert qkv is not None
            mixed = layer.mixer.attend(qkv, state, step)
            following = layers[index + 1][0] if index + 1 < len(layers) else None
            words = list(map(_words, _linears(layer)[:3]))
            norm: Tensor | None = None
            if following is not None:
                words.append(_words(following.mixer.qkv_proj))
                norm = following.input_norm.weight
            weights, eps, pdl = LayerWeights(*words), layer.ffn_norm.eps, self._context.pdl
            qkv = packed_layer(mixed, x, weights, layer.ffn_norm.weight, norm, eps, self._counters, pdl=pdl)
        return x

    def _launch_linears(self) -> None:
        """Launch the linears' own kernels, which steps with prompts end with: of their last layer they compute only
        the few rows that are sampled. The first step of all is one that compiles what it launches ahead of time; if
        these kernels were not among it, the first prompt would wait for them."""
        layer, linear = self._layers[-1], self._layers[-1].mixer.o_proj
        for rows in (1, MAX_ROWS):
            options: Any = {"dtype": self._context.dtype, "device": self._context.device}
            mixed = torch.zeros(rows, linear.weight.shape[1], **options)
            x: Residual = SplitKResidual(torch.zeros(rows, linear.weight.shape[0], **options), pdl=self._context.pdl)
            for projects in (True, False):
                x = layer.feed_forward(linear(mixed, add_to=x), norm=layer.ffn_norm)
                if projects:
                    layer.mixer.qkv_proj(x, norm=layer.input_norm)
            _ = x.rows  # adds up

    def _all_served(self) -> bool:
        if len({layer.ffn_norm.eps for layer in self._layers}) > 1 or not all(map(self._may_join, self._layers)):
            return False
        return packed_layer_serves([tuple(map(_words, _linears(layer))) for layer in self._layers])

    def _may_join(self, layer: Any) -> bool:
        mixer, feed_forward, context = layer.mixer, layer.feed_forward, self._context
        if type(mixer) is not Attention or type(feed_forward) is not MLP or feed_forward.activation != "silu":
            return False
        return layer.ffn_norm.fuses and joins_layers(
            *(
                linear_case(
                    linear.weight,
                    linear.bias,
                    rows=MAX_ROWS,
                    gated=linear is feed_forward.gate_up_proj,
                    added=linear in (mixer.o_proj, feed_forward.down_proj),
                    whole=context.group.size == 1,
                    dtype=context.dtype,
                    deterministic=context.deterministic,
                    gluon=context.gluon,
                )
                for linear in _linears(layer)
            )
        )


def _linears(layer: Any) -> tuple[Linear, ...]:
    mixer, feed_forward = layer.mixer, layer.feed_forward
    return mixer.o_proj, feed_forward.gate_up_proj, feed_forward.down_proj, mixer.qkv_proj


def _words(linear: Linear) -> PackedWords:
    return linear.weight.kernel_arguments()["weight"]
