"""Which models and options the native step of a CPU computes."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from nanovllm.attention.select import ropes_of
from nanovllm.config import Config
from nanovllm.layers.delta_net_spec import DeltaNetSpec
from nanovllm.layers.gated_attention_spec import GatedAttentionSpec
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.normed_router_spec import NormedRouterMoeSpec
from nanovllm.layers.query_scale_spec import ScaledQueryAttentionSpec
from nanovllm.layers.shared_expert_spec import SharedExpertSpec
from nanovllm.layers.shared_kv_spec import SharedKvAttentionSpec
from nanovllm.layers.short_conv_spec import ShortConvSpec
from nanovllm.layers.sink_spec import SinkAttentionSpec
from nanovllm.layers.spec import AttentionSpec, LayerSpec, MlpSpec, RopeSpec, Weight
from nanovllm.layers.stored_spec import StoredAttentionSpec, StoredMlpSpec
from nanovllm.layers.value_norm_spec import ValueNormAttentionSpec
from nanovllm.layers.wide_norm_spec import WideNormAttentionSpec
from nanovllm.models.gemma4_layer_spec import Gemma4LayerSpec
from nanovllm.models.per_layer_spec import PerLayerSpec
from nanovllm.models.post_norm_spec import PostNormLayerSpec, SandwichLayerSpec
from nanovllm.models.spec import ModelSpec
from nanovllm.native import GROUP
from nanovllm.native.cpu import multiplies_bfloat16, this_cpu
from nanovllm.weights.forms import HEAD, INT4, Form, Fp4Form, GroupForm, Int8Form, Packing

# The fields of specs that the step knows, or that do not concern it. Where another one is not at its default, the model
# has something that was added since.
LAYER = {
    *("hidden_size", "mixer", "feed_forward", "norm_eps", "norm_offset", "mixer_name", "feed_forward_name"),
    "norm_names",
}
ATTENTION = {
    *("hidden_size", "num_heads", "num_kv_heads", "head_dim", "rope", "window", "scale"),
    *("qkv_bias", "o_bias", "qk_norm_eps", "qk_norm_offset"),
}
MLP = {"hidden_size", "intermediate_size", "bias", "activation"}
MOE = {
    *("hidden_size", "intermediate_size", "num_experts", "num_experts_per_token", "norm_topk_prob", "router_name"),
    *("activation", "bias"),
}
SHARED = MOE | {"shared_size", "shared_name", "gated"}
KNOWN: dict[type, set[str]] = {
    ModelSpec: {
        *("architecture", "vocab_size", "hidden_size", "layers", "norm_eps", "max_position", "tie_word_embeddings"),
        *("dtype", "eos_token_ids", "norm_offset", "scales", "per_layer", "packing", "file_names"),
    },
    LayerSpec: LAYER,
    PostNormLayerSpec: LAYER,
    SandwichLayerSpec: LAYER | {"after_names"},
    Gemma4LayerSpec: LAYER | {"after_names", "index", "input_size", "experts", "experts_name", "expert_norms"},
    AttentionSpec: ATTENTION,
    ScaledQueryAttentionSpec: ATTENTION | {"beta", "original_length", "max_position"},
    StoredAttentionSpec: ATTENTION | {"as_one", "interleaved"},
    GatedAttentionSpec: ATTENTION | {"as_one", "interleaved"},
    SinkAttentionSpec: ATTENTION,
    ValueNormAttentionSpec: ATTENTION | {"values_are_keys", "shared_as"},
    SharedKvAttentionSpec: {"attention", "index", "source"},
    WideNormAttentionSpec: ATTENTION | {"wide_norm_eps"},
    RopeSpec: {"theta", "scaling", "rotated_dim"},
    ShortConvSpec: {"hidden_size", "kernel_size", "bias"},
    DeltaNetSpec: {
        *("hidden_size", "num_key_heads", "num_value_heads", "key_dim", "value_dim", "kernel_size", "norm_eps"),
        "by_key_head",
    },
    MlpSpec: MLP,
    StoredMlpSpec: MLP,
    MoeSpec: MOE,
    SharedExpertSpec: SHARED,
    NormedRouterMoeSpec: MOE | {"router_norm_eps"},
    GroupedMoeSpec: SHARED | {"scoring", "num_groups", "num_chosen_groups", "scaling", "least_sum"},
}
FORMS_MADE: dict[str, Form] = {"int4": INT4, "int8": Int8Form()}  # while loading, by the option `quantization`
Makes = Callable[[str, Weight], Form | None]  # what a weight is rounded to, by its prefix and itself
MOST_KEYS = 256  # of a head of a delta net: src/delta.c
MAX_POSITIONS = 1 << 18  # of a sequence: src/step.c, PASS_SEGMENTS segments


def reason_against(config: Config, model: ModelSpec, *, max_model_len: int) -> str | None:
    """Why torch has to compute this model with these options; None if the native step can."""
    return _option_against(config, model) or _shape_against(config, model, max_model_len)


def reason_against_products(config: Config, model: ModelSpec) -> str | None:
    """Why layers of torch have to multiply on torch, too."""
    if config.dtype == "bfloat16":
        return "dtype='bfloat16': the native library computes in float32"
    return _option_against(config, model)


def forms_to_make(config: Config, model: ModelSpec) -> Makes:
    """What weights are rounded to while loading: by the option `quantization`, and dummy weights as the config says."""
    dummy = config.load_format == "dummy" and keeps_packed(config)

    def made(prefix: str, weight: Weight) -> Form | None:
        stored = forms_of(model.packing if dummy else None, prefix, weight)
        asked = FORMS_MADE.get(config.quantization or "") if weight.packable else None
        if asked is not None and weight.names == ("lm_head.weight",):
            asked = HEAD
        return next(iter(stored), asked)

    return made


def forms_of(packing: Packing | None, prefix: str, weight: Weight) -> set[Form]:
    """Which the tensors of a weight have in a checkpoint. Any may be packed in a GGUF file."""
    if packing is None or not (weight.packable or packing.layout == "gguf"):
        return set()
    modules = [(prefix + name.format(0)).removesuffix(".weight") for name in weight.names]
    return {form for module in modules if (form := packing.form_of(module)) is not None}


def keeps_packed(config: Config) -> bool:
    """Whether weights that a file holds packed stay packed: unless dtype="float32" asks for exact arithmetic."""
    return config.dtype == "auto"


def cache_dtype(config: Config, model: ModelSpec) -> str:
    """The dtype of the KV cache. `auto`: 16 bits where activations are rounded to as many or to 8, and AVX512 widens
    them in passing, else float32."""
    if config.kv_cache_dtype != "auto":
        return config.kv_cache_dtype
    if config.dtype == "bfloat16":
        return "bfloat16"
    cpu = this_cpu()
    rounds = config.quantization in FORMS_MADE or bool(model.packing is not None and model.packing.forms)
    widens = cpu is not None and "avx512f" in cpu.features
    return "float16" if widens and rounds and keeps_packed(config) else "float32"


def norms_of(layer: LayerSpec) -> dict[str, str]:
    """The norms of a layer, by their fields in src/step.h: as checkpoints name them."""
    after = ("after_attention", "after_ffn")
    if isinstance(layer, PostNormLayerSpec):
        return dict(zip(after, layer.norm_names, strict=True))
    found = dict(zip(("input_norm", "ffn_norm"), layer.norm_names, strict=True))
    if isinstance(layer, SandwichLayerSpec):
        found |= zip(after, layer.after_names, strict=True)
    return found


def _option_against(config: Config, model: ModelSpec) -> str | None:
    if config.tensor_parallel_size * config.pipeline_parallel_size > 1:
        return "the model is divided over several devices"
    if config.dtype not in ("auto", "float32", "bfloat16"):
        return f"dtype={config.dtype!r}: it computes in float32"
    dense = config.quantization is None and model.packing is None and model.dtype == "bfloat16"
    if config.dtype == "bfloat16" and not (dense and multiplies_bfloat16()):
        return "dtype='bfloat16': it rounds to it only with a matrix unit (AMX) and where the checkpoint is in bfloat16"
    if config.kv_cache_dtype == "fp8":
        return "kv_cache_dtype='fp8' is not implemented in it"
    if config.attention_backend != "auto":
        return f"attention_backend={config.attention_backend!r}: it has its own attention"
    if config.quantization not in (None, "gguf", *FORMS_MADE):
        return f"quantization={config.quantization!r} is not implemented in it"
    unpacks = config.quantization is None and (model.packing is None or model.packing.layout == "gguf")
    if not (unpacks or keeps_packed(config)):
        return "dtype='float32': it would round activations to 8 bits, for which packed weights have to stay packed"
    return None


def attention_specs(model: ModelSpec) -> list[AttentionSpec]:
    """Of the layers that have keys and values of their own."""
    return [layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionSpec)]


def expert_specs(model: ModelSpec) -> set[MoeSpec]:
    """Those that differ."""
    parts = (part for layer in model.layers for part in (layer.feed_forward, getattr(layer, "experts", None)))
    return {part for part in parts if isinstance(part, MoeSpec)}


def _shape_against(config: Config, model: ModelSpec, max_model_len: int) -> str | None:
    experts = expert_specs(model)
    parts = [*experts, *(part for layer in model.layers for part in (layer, layer.mixer, layer.feed_forward))]
    unknown = next((found for part in (model, *parts) if (found := _unknown(part)) is not None), None)
    if unknown is not None:
        return f"{model.architecture}: {unknown} is not implemented in it"
    mixers = attention_specs(model)
    states = {layer.mixer for layer in model.layers if isinstance(layer.mixer, ShortConvSpec | DeltaNetSpec)}
    if not mixers:
        return "no layer has attention"
    for rope in ropes_of(mixers):
        if _unknown(rope) is not None:
            return f"{model.architecture}: {_unknown(rope)} of its rotary positions is not implemented in it"
    mlps = [layer.feed_forward for layer in model.layers if isinstance(layer.feed_forward, MlpSpec)]
    kinds = {_without_size(mixer) for mixer in mixers}
    feed_forwards: list[MlpSpec | MoeSpec] = [*mlps, *experts]
    activations = {part.activation for part in feed_forwards}
    others = {x.norm_eps for x in (*states, model.per_layer) if isinstance(x, DeltaNetSpec | PerLayerSpec)}
    others |= {x.router_norm_eps for x in experts if isinstance(x, NormedRouterMoeSpec)}
    epsilons = {layer.norm_eps for layer in model.layers} | others
    if any(len(found) > 1 for found in (kinds, states, experts, activations, epsilons)):
        return "its layers differ from one another"
    if any(isinstance(layer.feed_forward, MoeSpec) and "after_ffn" in norms_of(layer) for layer in model.layers):
        return "a norm of what experts give is not implemented in it"
    for mixer in mixers:
        if mixer.head_dim % 16:
            return f"head_dim={mixer.head_dim} is no multiple of 16"
    if states and (reason := _states_against(next(iter(states)))) is not None:
        return reason
    multiple = 4 if model.packing is None and config.quantization is None else 32
    if model.per_layer is not None and model.per_layer.size % 32:
        return f"a layer's own input of {model.per_layer.size} numbers is not implemented in it"
    widths = {each.intermediate_size for each in feed_forwards}
    widths |= {mixer.num_heads * mixer.head_dim for mixer in mixers}
    widths |= {each.shared_size for each in experts if isinstance(each, SharedExpertSpec) and each.shared_size}
    widths |= {each.num_value_heads * each.value_dim for each in states if isinstance(each, DeltaNetSpec)}
    sizes = (model.hidden_size, *sorted(widths))
    if any(size % multiple for size in sizes):
        return f"a width of {', '.join(map(str, sizes))} is no multiple of {multiple}"
    if model.packing is not None and not all(fits(form, size) for form in model.packing.forms for size in sizes):
        return f"{model.packing.layout} weights of this kind are not implemented in it"
    return None if max_model_len <= MAX_POSITIONS else f"max_model_len is above {MAX_POSITIONS}"


def _without_size(mixer: AttentionSpec) -> AttentionSpec:
    """What has to be the same in all layers with attention."""
    same: dict[str, Any] = {
        "rope": RopeSpec(theta=1.0),
        "window": None,
        "scale": None,
        "head_dim": 1,
        "num_kv_heads": 1,
    }
    if isinstance(mixer, ValueNormAttentionSpec):
        same |= {"values_are_keys": False, "shared_as": None}
    return replace(mixer, **same)


def _states_against(spec: ShortConvSpec | DeltaNetSpec) -> str | None:
    if isinstance(spec, ShortConvSpec):
        return f"a width of {spec.hidden_size} is no multiple of 16" if spec.hidden_size % 16 else None
    if spec.key_dim % 16 or spec.key_dim > MOST_KEYS or spec.value_dim % 32:
        return f"a delta net with heads of {spec.key_dim} and {spec.value_dim} numbers is not implemented in it"
    return None


def fits(form: Form, columns: int) -> bool:
    """Whether a matrix of this form, with so many columns, can stay packed."""
    if isinstance(form, Fp4Form):
        return form.group_size == GROUP and not form.has_unit and columns % GROUP == 0
    if not isinstance(form, GroupForm):
        return isinstance(form, Int8Form)
    size, _ = form.sizes_in(columns)
    by_16 = size == GROUP // 2 and bool(form.unit_size)  # Q6_K
    return not form.ordered and (size % GROUP == 0 or by_16) and form.unit_size % GROUP == 0


def _unknown(part: Any) -> str | None:
    """What the step does not know of a spec."""
    known = KNOWN.get(type(part))
    if known is None:
        return type(part).__name__
    return next((f.name for f in fields(part) if f.name not in known and getattr(part, f.name) != f.default), None)
