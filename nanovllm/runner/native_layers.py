"""A model as the native step reads it: its layers' weights and sizes, in the structures of native/src/step.h."""

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from nanovllm.layers.delta_net_spec import DeltaNetSpec
from nanovllm.layers.gated_attention_spec import GatedAttentionSpec
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from nanovllm.layers.moe_spec import ClampedGlu, MoeSpec
from nanovllm.layers.shared_expert_spec import SharedExpertSpec
from nanovllm.layers.shared_kv_spec import SharedKvAttentionSpec
from nanovllm.layers.short_conv_spec import ShortConvSpec
from nanovllm.layers.spec import AttentionSpec, MlpSpec, RopeSpec, Weight
from nanovllm.layers.value_norm_spec import ValueNormAttentionSpec
from nanovllm.layers.wide_norm_spec import WideNormAttentionSpec
from nanovllm.models.gemma4_layer_spec import Gemma4LayerSpec
from nanovllm.models.per_layer_spec import NORM, PROJECTION
from nanovllm.models.spec import ModelSpec
from nanovllm.native.support import attention_specs, expert_specs, norms_of
from nanovllm.native.weights import Matrix, NativeWeight, named_parts, pointer

ATTENTION, CONVOLUTION, DELTA_NET = range(3)
ACTIVATIONS = {"silu": 0, "gelu": 1}
CLAMPED, MOST_INPUTS = 2, 6
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class Layer(ctypes.Structure):
    _fields_ = (
        ("kind", INT),
        ("num_inputs", INT),
        ("inputs", Matrix * MOST_INPUTS),
        *((name, Matrix) for name in ("o", "gate", "up", "down", "router", "shared_gate")),
        *((name, POINTER) for name in ("experts", "choice_bias", "expert_factors")),
        *((name, POINTER) for name in ("input_norm", "ffn_norm", "after_attention", "after_ffn")),
        *((name, POINTER) for name in ("router_norm", "experts_norm", "after_mlp", "after_experts")),
        *((name, Matrix) for name in ("own_gate", "own_projection")),
        *((name, POINTER) for name in ("own_norm", "q_norm", "k_norm", "v_norm")),
        *((name, POINTER) for name in ("rotary", "sinks", "keys", "values", "filters", "filter_bias")),
        *((name, POINTER) for name in ("decay", "decay_bias", "out_norm", "states")),
        *((name, INT) for name in ("num_kv_heads", "head_dim")),
        *((name, FLOAT) for name in ("scale", "factor")),
        *((name, INT) for name in ("window", "group", "state_stride")),
    )


class Router(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("num_experts", "per_token", "uses_sigmoid", "normalizes")),
        *((name, INT) for name in ("num_groups", "chosen_groups")),
        *((name, FLOAT) for name in ("scaling", "least_sum")),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("num_layers", "hidden", "num_heads", "block_size", "kv_type", "num_parts")),
        *((name, INT) for name in ("activation", "norms_all_heads", "gates_queries", "conv_taps")),
        *((name, INT) for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim")),
        ("own_size", INT),
        *((name, FLOAT) for name in ("eps", "head_norm_eps", "last_norm_eps", "embedding_scale", "own_scale")),
        *((name, FLOAT) for name in ("clamp_alpha", "clamp_limit")),
        ("router", Router),
        *((name, POINTER) for name in ("query_scales", "layers")),
        *((name, Matrix) for name in ("embedding", "head", "own_table", "own_projection")),
        ("own_norm", POINTER),
        ("last_norm", POINTER),
    )


class NativeLayers:
    """The layers of a model, and what its layers have in common. Its addresses are valid as long as it exists."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, NativeWeight], rotary: Mapping[RopeSpec, Tensor]) -> None:
        """`weights`: by name in checkpoints. `rotary`: [max_position, head_dim]: cosines, then sines."""
        self.all = (Layer * spec.num_layers)()
        self._spec, self._weights, self._rotary = spec, weights, rotary
        self._windows = list(spec.windows)  # of the groups
        self._held: list[Any] = []  # what the layers have the addresses of, beside weights
        for index in range(spec.num_layers):
            self._describe_layer(self.all[index], index)

    def sizes(self) -> dict[str, Any]:
        """The fields of `Model` that layers decide."""
        first = self._spec.layers[0]
        mixers = [layer.mixer for layer in self._spec.layers]
        attention = attention_specs(self._spec)[0]
        wide_eps = attention.wide_norm_eps if isinstance(attention, WideNormAttentionSpec) else None
        found: dict[str, Any] = {
            "num_heads": attention.num_heads,
            "norms_all_heads": wide_eps is not None,
            "gates_queries": isinstance(attention, GatedAttentionSpec),
            "eps": first.norm_eps,
            "head_norm_eps": wide_eps or attention.qk_norm_eps or 0.0,
        }
        convolution = next((mixer for mixer in mixers if isinstance(mixer, ShortConvSpec | DeltaNetSpec)), None)
        if convolution is not None:
            found["conv_taps"] = convolution.kernel_size
        if isinstance(convolution, DeltaNetSpec):
            names = ("num_key_heads", "num_value_heads", "key_dim", "value_dim")
            found |= {name: getattr(convolution, name) for name in names}
        if (own := self._spec.per_layer) is not None:
            found["own_size"] = own.size
            found["own_table"] = self._weights[own.table().names[0]].matrix()
            found["own_projection"] = self._weights[f"{PROJECTION}weight"].matrix()
            found["own_norm"] = pointer(self._weights[f"{NORM}weight"].data)
        feed_forwards = cast(list[MlpSpec | MoeSpec], [layer.feed_forward for layer in self._spec.layers])
        activation = feed_forwards[0].activation
        if isinstance(activation, ClampedGlu):
            found |= {"activation": CLAMPED, "clamp_alpha": activation.alpha, "clamp_limit": activation.limit}
        else:
            found["activation"] = ACTIVATIONS[activation]
        experts = next(iter(expert_specs(self._spec)), None)
        return found if experts is None else found | {"router": _router(experts)}

    def _describe_layer(self, layer: Layer, index: int) -> None:
        spec, prefix = self._spec.layers[index], f"model.layers.{index}."
        mixer, feed_forward = f"{prefix}{spec.mixer_name}.", f"{prefix}{spec.feed_forward_name}."
        layer.factor = 1.0
        for field, name in norms_of(spec).items():
            self._set_vector(layer, field, f"{prefix}{name}.weight")
        if isinstance(spec.mixer, AttentionSpec | SharedKvAttentionSpec):
            self._describe_attention(layer, mixer, spec.mixer)
        else:
            assert isinstance(spec.mixer, ShortConvSpec | DeltaNetSpec)
            self._describe_states(layer, mixer, spec.mixer)
        weights = cast(MlpSpec | MoeSpec, spec.feed_forward).weights()
        if isinstance(spec.feed_forward, MoeSpec):
            self._describe_experts(layer, feed_forward, spec.feed_forward)
        else:
            self._describe_mlp(layer, feed_forward, weights)
        if isinstance(spec, Gemma4LayerSpec):
            self._describe_additions(layer, prefix, spec)

    def _describe_additions(self, layer: Layer, prefix: str, spec: Gemma4LayerSpec) -> None:
        """What Gemma 4 has beside attention and MLP."""
        layer.factor = float(self._weights[f"{prefix}layer_scalar.weight"].data)
        if spec.input_size:
            gate, projection, norm = (f"{prefix}{name}" for name in spec.input_weights())
            layer.own_gate, layer.own_projection = self._matrix(gate, None), self._matrix(projection, None)
            self._set_vector(layer, "own_norm", f"{norm}.weight")
        if spec.experts is not None:
            experts = f"{prefix}{spec.experts_name}."
            self._describe_experts(layer, experts, spec.experts)
            for field, name in zip(("after_mlp", "experts_norm", "after_experts"), spec.expert_norms, strict=True):
                self._set_vector(layer, field, f"{prefix}{name}.weight")
            names = {name: experts + weight.names[0] for name, weight in spec.experts.weights().items()}
            self._set_vector(layer, "expert_factors", names["expert_factors"])
            layer.router_norm = self._hold(self._weights[names["router_norm"]].data * spec.hidden_size**-0.5)

    def _describe_attention(self, layer: Layer, prefix: str, mixer: AttentionSpec | SharedKvAttentionSpec) -> None:
        spec, inputs = (mixer, "qkv_") if isinstance(mixer, AttentionSpec) else (mixer.attention, "query_")
        weights = mixer.weights()
        layer.scale = spec.score_scale
        layer.kind, layer.num_kv_heads, layer.head_dim = ATTENTION, spec.num_kv_heads, spec.head_dim
        layer.rotary = pointer(self._rotary[spec.rope])
        layer.window, layer.group = spec.window or 0, self._windows.index(spec.window)
        self._set_inputs(layer, self._matrices(prefix, weights, inputs))
        if isinstance(spec, ValueNormAttentionSpec):
            layer.v_norm = self._hold(torch.ones(spec.head_dim))
        (layer.o,) = self._matrices(prefix, weights, "o_")
        for field in ("q_norm", "k_norm", "sinks"):
            if field in weights:
                self._set_vector(layer, field, prefix + weights[field].names[0])

    def _describe_states(self, layer: Layer, prefix: str, spec: ShortConvSpec | DeltaNetSpec) -> None:
        weights = spec.weights()
        layer.kind, inputs = CONVOLUTION, self._matrices(prefix, weights, "in_")
        (layer.o,) = self._matrices(prefix, weights, "out_")
        filters = torch.cat([self._weights[name].data for name, _ in named_parts(prefix, weights["conv"])])
        layer.filters = self._hold(filters[:, 0].T)  # [channels, 1, taps] -> [taps, channels]
        if "conv_bias" in weights:
            self._set_vector(layer, "filter_bias", prefix + weights["conv_bias"].names[0])
        if isinstance(spec, DeltaNetSpec):
            layer.kind = DELTA_NET
            inputs += self._matrices(prefix, weights, "gates_")
            layer.decay = self._hold(-self._weights[f"{prefix}A_log"].data.exp())
            self._set_vector(layer, "decay_bias", f"{prefix}dt_bias")
            self._set_vector(layer, "out_norm", prefix + weights["norm"].names[0])
        self._set_inputs(layer, inputs)

    def _describe_mlp(self, layer: Layer, prefix: str, weights: Mapping[str, Weight]) -> None:
        layer.gate, layer.up = self._matrices(prefix, weights, "gate_up_")
        (layer.down,) = self._matrices(prefix, weights, "down_")

    def _describe_experts(self, layer: Layer, prefix: str, spec: MoeSpec) -> None:
        weights = spec.weights()
        bias = "bias" if spec.bias else None
        layer.router = self._matrix(f"{prefix}{spec.router_name}", bias)
        names = [f"{prefix}experts.{n}.{name}_proj" for n in range(spec.num_experts) for name in ("gate", "up", "down")]
        experts = (Matrix * len(names))(*(self._matrix(name, bias) for name in names))
        self._held.append(experts)
        layer.experts = ctypes.addressof(experts)
        if isinstance(spec, SharedExpertSpec) and spec.shared_size:
            shared = {name.removeprefix("shared_"): one for name, one in weights.items() if name.startswith("shared_")}
            self._describe_mlp(layer, prefix, shared)
            if spec.gated:
                layer.shared_gate = self._matrix(f"{prefix}{spec.shared_name}_gate", None)
        if "choice_bias" in weights:
            self._set_vector(layer, "choice_bias", prefix + weights["choice_bias"].names[0])

    def _set_inputs(self, layer: Layer, matrices: Sequence[Matrix]) -> None:
        layer.num_inputs = len(matrices)
        for number, matrix in enumerate(matrices):
            layer.inputs[number] = matrix

    def _set_vector(self, layer: Layer, field: str, name: str) -> None:
        setattr(layer, field, pointer(self._weights[name].data))

    def _matrix(self, module: str, bias: str | None) -> Matrix:
        return self._weights[f"{module}.weight"].matrix(self._weights[f"{module}.{bias}"] if bias else None)

    def _matrices(self, prefix: str, weights: Mapping[str, Weight], kind: str) -> list[Matrix]:
        """The matrices of a linear, with their biases."""
        names = [name for name, _ in named_parts(prefix, weights[f"{kind}weight"])]
        biases: Sequence[str | None] = (None,) * len(names)
        if f"{kind}bias" in weights:
            biases = [name for name, _ in named_parts(prefix, weights[f"{kind}bias"])]
        pairs = zip(names, biases, strict=True)
        return [self._weights[name].matrix(None if bias is None else self._weights[bias]) for name, bias in pairs]

    def _hold(self, tensor: Tensor) -> Any:
        self._held.append(tensor.contiguous())
        return pointer(self._held[-1])


def _router(spec: MoeSpec) -> Router:
    found = Router(
        num_experts=spec.num_experts,
        per_token=spec.num_experts_per_token,
        normalizes=spec.norm_topk_prob,
        num_groups=1,
        chosen_groups=1,
        scaling=1.0,
    )
    if isinstance(spec, GroupedMoeSpec):
        found.uses_sigmoid = spec.scoring == "sigmoid"
        found.num_groups, found.chosen_groups = spec.num_groups, spec.num_chosen_groups
        found.scaling, found.least_sum = spec.scaling, spec.least_sum
    return found
