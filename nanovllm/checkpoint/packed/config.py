"""Read `quantization_config` of config.json, or hf_quant_config.json, as a `Packing`. No torch.

A value that would be computed differently from what it says is refused with its key. So is a key that is not known,
unless it is empty or only describes how the checkpoint was made.
"""

import re
from collections.abc import Callable
from fnmatch import translate
from typing import Any

from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import Form, Fp8Form, Packing

Rules = list[tuple[str, Form | None]]
EVERY = ""  # the pattern that is found in every name
HEAD = r"(^|\.)lm_head$"
# How the checkpoint was made, and what concerns activations or the KV cache that is decided here
DESCRIPTIVE = {"quant_method", "version", "quantization_status", "global_compression_ratio", "producer", "quant_type"}


class Section:
    """A JSON object of the config, whose keys are taken one by one."""

    def __init__(self, raw: Any, name: str, *, described_by: set[str] = frozenset()) -> None:  # type: ignore[assignment]
        if not isinstance(raw, dict):
            raise CheckpointError(f"{name}={raw!r}: must be a JSON object")
        self._left = {key: value for key, value in raw.items() if key not in DESCRIPTIVE | described_by}
        self.name = name

    def take(self, key: str, default: Any = None) -> Any:
        value = self._left.pop(key, default)
        return default if value is None else value

    def one_of(self, key: str, known: tuple[Any, ...], default: Any = None) -> Any:
        value = self.take(key, default)
        if value not in known:
            raise self.refusal(key, value, f"; known: {', '.join(map(repr, known))}")
        return value

    def names(self, key: str) -> list[str]:
        value = self.take(key, [])
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.refusal(key, value, ": must be a list of names")
        return value

    def refusal(self, key: str, value: Any, why: str = "") -> CheckpointError:
        return CheckpointError(f"{self.name}: {key}={value!r} cannot be read{why}")

    def end(self) -> None:
        """Refuse a key that nothing has asked for, if it says anything."""
        for key, value in self._left.items():
            if value:
                raise self.refusal(key, value, ": the key is not known")


def read_packing(raw: Any) -> Packing:
    """`raw`: the value of quantization_config."""
    method = raw.get("quant_method") if isinstance(raw, dict) else raw
    if method not in METHODS:
        raise CheckpointError(
            f"quantization_config: quant_method={method!r} cannot be read; known: {', '.join(METHODS)}"
        )
    return Packing(method, tuple(METHODS[method](raw)))


def named(name: str) -> str:
    """The pattern of a module, or of all modules under it; `re:` marks a pattern, which must match from the start."""
    if name.startswith("re:"):
        try:
            return f"^(?:{re.compile(name[3:]).pattern})"
        except re.error as error:
            raise CheckpointError(f"quantization_config: {name!r} is not a regular expression: {error}") from error
    return rf"(^|\.){re.escape(name)}($|\.)"


# --- fp8: Qwen, DeepSeek, transformers --------------------------------------------------------------------------------


def _fp8(raw: dict[str, Any]) -> Rules:
    config = Section(raw, "quantization_config")
    config.one_of("fmt", ("e4m3",), "e4m3")
    config.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    form = Fp8Form(_block(config, "weight_block_size"))
    kept = config.names("modules_to_not_convert") + config.names("ignored_layers")
    config.end()
    return [*((named(name), None) for name in kept), (HEAD, None), (EVERY, form)]


def _block(section: Section, key: str) -> tuple[int, int] | None:
    value = section.take(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise section.refusal(key, value, ": must be two sizes")
    return value[0], value[1]


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _compressed_tensors(raw: dict[str, Any]) -> Rules:
    config = Section(raw, "quantization_config", described_by={"kv_cache_scheme"})
    rules: Rules = [(named(name), None) for name in config.names("ignore")]
    sparsity, transform = config.take("sparsity_config", {}), config.take("transform_config", {})
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise config.refusal("sparsity_config", sparsity)
    if transform and transform.get("config_groups"):
        raise config.refusal("transform_config", transform)
    layout = config.take("format")
    groups = config.take("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config.refusal("config_groups", groups)
    config.end()
    for name, group in groups.items():
        section = Section(group, f"quantization_config: config_groups: {name}")
        targets = section.names("targets")
        form = _group_form(section, layout)
        section.end()
        rules += [(EVERY if target == "Linear" else named(target), form) for target in targets]
    return rules


def _group_form(group: Section, layout: str | None) -> Form:
    """The form of a config group, from what it says about weights and inputs."""
    layout = group.take("format", layout)
    if group.take("output_activations"):
        raise group.refusal("output_activations", "...")
    made_by = {"observer", "observer_kwargs", "dynamic", "scale_dtype", "zp_dtype"}
    weights = Section(group.take("weights"), f"{group.name}: weights", described_by=made_by)
    inputs = group.take("input_activations")
    if inputs is not None:
        inputs = Section(inputs, f"{group.name}: input_activations", described_by=made_by)
    bits, kind = weights.take("num_bits"), weights.take("type", "int")
    if (kind, bits) not in FORMS:
        raise weights.refusal("num_bits", bits, f" with type={kind!r}")
    form = FORMS[kind, bits](weights, inputs, layout)
    weights.end()
    return form


def _float_form(weights: Section, inputs: Section | None, layout: str | None) -> Form:
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"), "tensor")
    weights.one_of("symmetric", (True,), True)
    block = _block(weights, "block_structure")
    weights.take("group_size")
    if inputs is not None:
        inputs.one_of("type", ("float",), "float")
        inputs.one_of("num_bits", (8,), 8)
        inputs.one_of("symmetric", (True,), True)
    if (block is not None) != (strategy == "block"):
        raise weights.refusal("block_structure", block, f" with strategy={strategy!r}")
    return Fp8Form(block, rounds_inputs=inputs is not None)


FORMS: dict[tuple[str, int], Callable[[Section, Section | None, str | None], Form]] = {("float", 8): _float_form}


# --- ModelOpt ---------------------------------------------------------------------------------------------------------


def _modelopt(raw: Any) -> Rules:
    """Names to leave out are patterns of a shell: * stands for any text."""
    config = Section(raw, "quantization_config", described_by={"kv_cache_quant_algo", "kv_cache_scheme"})
    algorithm = config.one_of("quant_algo", tuple(MODELOPT))
    kept = config.names("exclude_modules") + config.names("ignore")
    config.take("config_groups")  # says the same again
    form = MODELOPT[algorithm](config)
    config.end()
    left_out: Rules = [(rf"^(?:{translate(name)})|^(?:{translate(name + '.*')})", None) for name in kept]
    return [*left_out, (EVERY, form)]


def _modelopt_fp8(config: Section) -> Form:
    config.take("group_size")
    return Fp8Form()


MODELOPT: dict[str, Callable[[Section], Form]] = {
    "FP8": _modelopt_fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _modelopt_fp8,
}

METHODS: dict[str, Callable[[dict[str, Any]], Rules]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
