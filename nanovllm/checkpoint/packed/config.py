"""Read `quantization_config` of config.json, or hf_quant_config.json, as a `Packing`. No torch.

A value that would be computed differently from what it says is refused with its key. So is a key that is not known,
unless it is empty or only describes how the checkpoint was made.
"""

import re
from collections.abc import Callable, Set
from fnmatch import translate
from functools import partial
from typing import Any

from nanovllm.checkpoint.text_part import text_name
from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import Form, Fp4Form, Fp8Form, GroupForm, Int8Form, Packing

Rules = list[tuple[str, Form | None]]
EVERY = ""  # the pattern that is found in every name
HEAD = r"(^|\.)lm_head$"
# How the checkpoint was made
DESCRIPTIVE = {"quant_method", "quantization_status", "global_compression_ratio", "producer", "quant_type"}


class Section:
    """A JSON object of the config, whose keys are taken one by one."""

    def __init__(self, raw: Any, name: str, *, described_by: Set[str] = frozenset()) -> None:
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
    return METHODS[method](raw)


def named(name: str) -> str:
    """The pattern of a module, or of all modules under it; `re:` marks a pattern, which must match from the start."""
    if name.startswith("re:"):
        try:
            return f"^(?:{re.compile(name[3:]).pattern})"
        except re.error as error:
            raise CheckpointError(f"quantization_config: {name!r} is not a regular expression: {error}") from error
    return rf"(^|\.){re.escape(text_name(name.strip('.')))}($|\.)"


def left_out(names: list[str]) -> Rules:
    """One pattern for all: a config may list hundreds, and a checkpoint has tens of thousands of modules."""
    return [("|".join(map(named, names)), None)] if names else []


# --- fp8: Qwen, DeepSeek, transformers --------------------------------------------------------------------------------


def _fp8(raw: dict[str, Any]) -> Packing:
    config = Section(raw, "quantization_config")
    config.one_of("fmt", ("e4m3",), "e4m3")
    config.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    config.one_of("dequantize", (False,), False)
    form = Fp8Form(_block(config, "weight_block_size"))
    kept = config.names("modules_to_not_convert") + config.names("ignored_layers")
    config.end()
    return Packing("fp8", (*left_out(kept), (HEAD, None), (EVERY, form)))


def _block(section: Section, key: str) -> tuple[int, int] | None:
    value = section.take(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(isinstance(size, int) and size > 0 for size in value):
        raise section.refusal(key, value, ": must be two sizes")
    return value[0], value[1]


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _compressed_tensors(raw: dict[str, Any]) -> Packing:
    config = Section(raw, "quantization_config", described_by={"kv_cache_scheme", "version"})
    rules = left_out(config.names("ignore"))
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
    return Packing("compressed-tensors", tuple(rules))


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


def _check_inputs(inputs: Section | None, kind: str) -> None:
    """Accept 8-bit inputs with any granularity of scales: here each token gets its own scale."""
    if inputs is None:
        return
    inputs.one_of("type", (kind,), kind)
    inputs.one_of("num_bits", (8,), 8)
    inputs.one_of("symmetric", (True,), True)
    for key in ("strategy", "group_size", "block_structure", "actorder"):
        inputs.take(key)
    inputs.end()


def _float_form(weights: Section, inputs: Section | None, layout: str | None) -> Form:
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"), "tensor")
    weights.one_of("symmetric", (True,), True)
    block = _block(weights, "block_structure")
    weights.take("group_size")
    _check_inputs(inputs, "float")
    if (block is not None) != (strategy == "block"):
        raise weights.refusal("block_structure", block, f" with strategy={strategy!r}")
    return Fp8Form(block, rounds_inputs=inputs is not None)


def _integer_form(weights: Section, inputs: Section | None, layout: str | None, *, bits: int) -> Form:
    if layout in ("int-quantized", "naive-quantized") and bits == 8:
        return _row_form(weights, inputs)
    if layout != "pack-quantized" or inputs is not None:
        raise weights.refusal("type", "int", f" with format={layout!r} and input_activations")
    strategy = weights.one_of("strategy", ("channel", "group"), "channel")
    size = weights.take("group_size", -1)
    if strategy == "channel":
        size = 0
    elif not isinstance(size, int) or size < 1:
        raise weights.refusal("group_size", size)
    order = weights.one_of("actorder", (None, False, True, "weight", "static", "group", "dynamic"))
    symmetric = weights.one_of("symmetric", (True, False), True)
    return GroupForm(bits, size, zero=not symmetric, ordered=order in (True, "group", "dynamic"))


def _row_form(weights: Section, inputs: Section | None) -> Form:
    weights.one_of("strategy", ("channel", "tensor"), "tensor")
    weights.one_of("symmetric", (True,), True)
    weights.take("group_size")
    _check_inputs(inputs, "int")
    return Int8Form(rounds_inputs=inputs is not None)


def _small_float_form(weights: Section, inputs: Section | None, layout: str | None) -> Form:
    """Inputs are not rounded, whatever the config says of them."""
    kind = {"nvfp4-pack-quantized": Fp4Form(16, has_unit=True), "mxfp4-pack-quantized": Fp4Form(32)}
    if layout not in kind:
        raise weights.refusal("num_bits", 4, f" with type='float' and format={layout!r}")
    weights.one_of("strategy", ("tensor_group", "group"))
    weights.one_of("group_size", (kind[layout].group_size,))
    weights.one_of("symmetric", (True,), True)
    return kind[layout]


FORMS: dict[tuple[str, int], Callable[[Section, Section | None, str | None], Form]] = {
    ("float", 4): _small_float_form,
    ("float", 8): _float_form,
    ("int", 4): partial(_integer_form, bits=4),
    ("int", 8): partial(_integer_form, bits=8),
}


# --- AWQ and GPTQ -----------------------------------------------------------------------------------------------------


def _awq(raw: dict[str, Any]) -> Packing:
    made_by = {"backend", "do_fuse", "fuse_max_seq_len", "exllama_config", "modules_to_fuse"}
    config = Section(raw, "quantization_config", described_by=made_by)
    config.one_of("bits", (4,))
    config.one_of("zero_point", (True,), True)
    config.one_of("version", ("gemm", "GEMM"), "gemm")
    form = GroupForm(4, _group_size(config), zero=True)
    kept = config.names("modules_to_not_convert")
    config.end()
    return Packing("awq", (*left_out(kept), (HEAD, None), (EVERY, form)))


GPTQ_MADE_BY = {
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "dataset", "tokenizer"),
    *("model_name_or_path", "model_file_base_name", "model_seqlen", "batch_size", "pad_token_id", "quantizer", "meta"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "cache_block_outputs", "max_input_length"),
    *("offload_to_disk", "offload_to_disk_path", "pack_impl", "mock_quantization"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend", "hyb_act", "act_group_aware"),
}


def _gptq(raw: dict[str, Any]) -> Packing:
    config = Section(raw, "quantization_config", described_by=GPTQ_MADE_BY)
    form = _gptq_form(config, GroupForm(4, 0))
    layout = config.one_of("checkpoint_format", ("gptq", "gptq_v2"), config.take("format", "gptq"))
    config.one_of("pack_dtype", ("int32",), "int32")
    rules = left_out(config.names("modules_to_not_convert"))
    for pattern, changes in config.take("dynamic", {}).items():
        # "-:" leaves modules out, "+:" or nothing gives them other settings
        section = Section(changes, f"quantization_config: dynamic: {pattern}")
        own = None if pattern.startswith("-:") else _gptq_form(section, form)
        section.end()
        rules.append((named(f"re:{pattern[2:] if pattern[:2] in ('-:', '+:') else pattern}"), own))
    if not config.take("lm_head", False):
        rules.append((HEAD, None))
    config.end()
    return Packing(layout, (*rules, (EVERY, form)))


def _gptq_form(config: Section, default: GroupForm) -> GroupForm:
    return GroupForm(
        config.one_of("bits", (4, 8), default.bits),
        _group_size(config, default.group_size),
        zero=not config.one_of("sym", (True, False), not default.zero),
        ordered=config.one_of("desc_act", (True, False), default.ordered),
    )


def _group_size(config: Section, default: int = 0) -> int:
    """0 = one group per row, which configs write as -1."""
    size = config.take("group_size", default or -1)
    if not isinstance(size, int) or size == 0 or size < -1:
        raise config.refusal("group_size", size)
    return max(size, 0)


# --- ModelOpt ---------------------------------------------------------------------------------------------------------


def _modelopt(raw: Any) -> Packing:
    """Names to leave out are patterns of a shell: * stands for any text."""
    config = Section(raw, "quantization_config", described_by={"kv_cache_quant_algo", "kv_cache_scheme"})
    algorithm = config.one_of("quant_algo", tuple(MODELOPT))
    kept = config.names("exclude_modules") + config.names("ignore")
    config.take("config_groups")  # says the same again
    form = MODELOPT[algorithm](config)
    config.end()
    rules: Rules = [(rf"^(?:{translate(name)})|^(?:{translate(name + '.*')})", None) for name in kept]
    return Packing("modelopt", (*rules, (EVERY, form)))


def _modelopt_fp8(config: Section) -> Form:
    config.take("group_size")
    return Fp8Form()


def _modelopt_nvfp4(config: Section) -> Form:
    config.one_of("group_size", (16,), 16)
    return Fp4Form(16, has_unit=True)


MODELOPT: dict[str, Callable[[Section], Form]] = {
    "FP8": _modelopt_fp8,
    "FP8_PER_CHANNEL_PER_TOKEN": _modelopt_fp8,
    "NVFP4": _modelopt_nvfp4,
}


# --- MXFP4 of gpt-oss, bitsandbytes -----------------------------------------------------------------------------------


def _mxfp4(raw: dict[str, Any]) -> Packing:
    """Only experts are packed."""
    config = Section(raw, "quantization_config")
    kept = left_out(config.names("modules_to_not_convert"))
    config.end()
    return Packing("mxfp4", (*kept, (r"\.experts\b", Fp4Form(32))))


def _bitsandbytes(raw: dict[str, Any]) -> Packing:
    """Without forms: all is unpacked."""
    made_by = {key for key in raw if key.startswith(("bnb_4bit_compute", "llm_int8", "bnb_4bit_quant_storage"))}
    config = Section(raw, "quantization_config", described_by=made_by | {"_load_in_4bit", "_load_in_8bit"})
    config.one_of("load_in_4bit", (True,), False)
    config.one_of("bnb_4bit_quant_type", ("nf4",), "fp4")
    config.take("bnb_4bit_use_double_quant")
    config.end()
    return Packing("bitsandbytes")


METHODS: dict[str, Callable[[dict[str, Any]], Packing]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
