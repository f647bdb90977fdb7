"""Read `quantization_config` of config.json, or hf_quant_config.json, as a `Packing`. No torch.

A value that would be computed differently from what it says is refused with its key. So is a key that is not known,
unless it is empty or only describes how the checkpoint was made.
"""

import re
from collections.abc import Callable, Iterable, Set
from fnmatch import translate
from functools import partial
from typing import Any

from nanovllm.checkpoint.text_part import text_name
from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import Form, Fp4Form, Fp8Form, GroupForm, Int8Form, Packing, Rule

Rules = list[Rule]
EVERY = ""  # the pattern that is found in every name
HEAD = r"(^|\.)lm_head$"
NO_GROUPS = (None, -1, 0)  # what group_size says where rows are not divided
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
        return known[known.index(value)]  # 4 for 4.0

    def objects(self, key: str) -> dict[str, Any]:
        """A JSON object, empty if there is none."""
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, value, ": must be a JSON object")
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
    if not isinstance(raw, dict):
        raise CheckpointError(f"quantization_config={raw!r}: must be a JSON object")
    method = raw.get("quant_method")
    if not isinstance(method, str) or method not in METHODS:
        raise CheckpointError(
            f"quantization_config: quant_method={method!r} cannot be read; known: {', '.join(METHODS)}"
        )
    return METHODS[method](raw)


def named(names: Iterable[str], form: Form | None) -> Rules:
    """Rules that give this form to modules, or to all modules under what is named. A name that begins with `re:` is a
    pattern, which must match from the start."""
    names = list(names)
    plain = frozenset(text_name(name.strip(".")) for name in names if not name.startswith("re:"))
    rules: Rules = [(_pattern(name), form) for name in names if name.startswith("re:")]
    return [(plain, form), *rules] if plain else rules


def _pattern(name: str) -> str:
    """It may be written for a model with a vision tower as well."""
    own = re.sub(r"language_model\\?\.(?=model|lm_head)", "", name[3:])
    own = re.sub(r"model\\?\.language_model\b", "model", own)
    return _compiled(f"^(?:{own})", name)


def _compiled(pattern: str, name: str) -> str:
    try:
        return re.compile(pattern).pattern
    except re.error as error:
        raise CheckpointError(f"quantization_config: {name!r} is not a regular expression: {error}") from error


def not_converted(config: Section) -> Rules:
    """`modules_to_not_convert`, whose names transformers also takes as patterns, such as model.layers.*.self_attn."""
    names = config.names("modules_to_not_convert")
    patterns = [name for name in names if re.search(r"[][*+?()|^$\\]", name)]
    rules: Rules = [(_compiled(rf"^(?:{text_name(name)})((?<=\.)|$|\.)", name), None) for name in patterns]
    return named([name for name in names if name not in patterns], None) + rules


# --- fp8: Qwen, DeepSeek, transformers --------------------------------------------------------------------------------


def _fp8(raw: dict[str, Any]) -> Packing:
    """`scale_fmt` says whether scales are powers of two: float32 numbers or e8m0, both are read as they are."""
    config = Section(raw, "quantization_config", described_by={"kv_cache_scheme"})
    config.one_of("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    config.one_of("scale_fmt", ("float", "ue8m0"), "float")
    config.one_of("expert_dtype", ("fp8",), "fp8")
    config.one_of("activation_scheme", ("dynamic", "static"), "dynamic")
    config.one_of("dequantize", (False,), False)
    form = Fp8Form(_block(config, "weight_block_size"))
    kept = not_converted(config) + named(config.names("ignored_layers"), None)
    config.end()
    return Packing("fp8", (*kept, (HEAD, None), (EVERY, form)))


def _block(section: Section, key: str) -> tuple[int, int] | None:
    value = section.take(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(map(_is_size, value)):
        raise section.refusal(key, value, ": must be two sizes")
    return value[0], value[1]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def _compressed_tensors(raw: dict[str, Any]) -> Packing:
    config = Section(raw, "quantization_config", described_by={"kv_cache_scheme", "version"})
    rules = named(config.names("ignore"), None)
    sparsity, transform = config.objects("sparsity_config"), config.objects("transform_config")
    if sparsity and sparsity.get("format", "dense") != "dense":
        raise config.refusal("sparsity_config", sparsity)
    if any(transform.values()):
        raise config.refusal("transform_config", transform)
    layout = config.take("format")
    groups = config.take("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config.refusal("config_groups", groups)
    config.end()
    by_name: Rules = []
    by_class: Rules = []  # used for modules that no group names
    for name, group in groups.items():
        section = Section(group, f"quantization_config: config_groups: {name}")
        targets = section.names("targets")
        if not targets:
            raise section.refusal("targets", targets)
        form = _group_form(section, layout)
        section.end()
        by_name += named([target for target in targets if target != "Linear"], form)
        by_class += [(EVERY, form)] * ("Linear" in targets)
    return Packing("compressed-tensors", (*rules, *by_name, *by_class))


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
    make = next((make for known, make in FORMS.items() if known == (kind, bits)), None)
    if make is None:
        raise weights.refusal("num_bits", bits, f" with type={kind!r}")
    form = make(weights, inputs, layout)
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
    if layout not in ("float-quantized", "naive-quantized", None):
        raise weights.refusal("type", "float", f" of 8 bits with format={layout!r}")
    strategy = weights.one_of("strategy", ("tensor", "channel", "block"), "tensor")
    weights.one_of("symmetric", (True,), True)
    block = _block(weights, "block_structure")
    weights.one_of("group_size", NO_GROUPS)
    _check_inputs(inputs, "float")
    if (block is not None) != (strategy == "block"):
        raise weights.refusal("block_structure", block, f" with strategy={strategy!r}")
    return Fp8Form(block, rounds_inputs=inputs is not None)


def _integer_form(weights: Section, inputs: Section | None, layout: str | None, *, bits: int) -> Form:
    if layout in ("int-quantized", "naive-quantized") and bits == 8:
        return _row_form(weights, inputs)
    if layout != "pack-quantized" or inputs is not None:
        raise weights.refusal("type", "int", f" with format={layout!r} and input_activations")
    if weights.one_of("strategy", ("channel", "group"), "channel") == "channel":
        weights.one_of("group_size", NO_GROUPS)
        size = 0
    else:
        size = weights.take("group_size")
        if not _is_size(size):
            raise weights.refusal("group_size", size)
    order = weights.one_of("actorder", (None, False, True, "weight", "static", "group", "dynamic"))
    symmetric = weights.one_of("symmetric", (True, False), True)
    return GroupForm(bits, size, zero=not symmetric, ordered=order in (True, "group", "dynamic"))


def _row_form(weights: Section, inputs: Section | None) -> Form:
    weights.one_of("strategy", ("channel", "tensor"), "tensor")
    weights.one_of("symmetric", (True,), True)
    weights.one_of("group_size", NO_GROUPS)
    _check_inputs(inputs, "int")
    return Int8Form(rounds_inputs=inputs is not None)


def _small_float_form(weights: Section, inputs: Section | None, layout: str | None) -> Form:
    """Inputs are not rounded, whatever the config says of them."""
    kind = {"nvfp4-pack-quantized": Fp4Form(16, has_unit=True), "mxfp4-pack-quantized": Fp4Form(32)}
    if not isinstance(layout, str) or layout not in kind:
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


# Both are written by GPTQModel and transformers, which know the settings of one for the other as well
MADE_BY = {
    *("damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "mse", "dataset", "tokenizer"),
    *("model_name_or_path", "model_file_base_name", "model_seqlen", "batch_size", "pad_token_id", "quantizer", "meta"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "cache_block_outputs", "max_input_length"),
    *("offload_to_disk", "offload_to_disk_path", "pack_impl", "mock_quantization", "hyb_act", "act_group_aware"),
    *("use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config", "backend"),
    *("do_fuse", "fuse_max_seq_len", "modules_to_fuse"),
}


def _awq(raw: dict[str, Any]) -> Packing:
    config = Section(raw, "quantization_config", described_by=MADE_BY)
    for key in ("version", "format", "checkpoint_format"):
        config.one_of(key, ("gemm", "GEMM"), "gemm")
    config.one_of("method", ("awq",), "awq")
    return Packing("awq", _group_rules(config, _awq_form, GroupForm(0, 128, zero=True)))


def _awq_form(config: Section, default: GroupForm) -> GroupForm:
    """`zero_point` decides where transformers writes `sym` as well. Zeros of a symmetric file are all 8."""
    config.one_of("desc_act", (False,), False)
    symmetric = config.one_of("sym", (True, False), not default.zero)
    return GroupForm(
        config.one_of("bits", (4,), default.bits or None),
        _group_size(config, default.group_size),
        zero=config.one_of("zero_point", (True, False), not symmetric),
    )


def _gptq(raw: dict[str, Any]) -> Packing:
    config = Section(raw, "quantization_config", described_by=MADE_BY)
    config.one_of("method", ("gptq",), "gptq")
    layout = config.one_of("format", ("gptq", "gptq_v2"), "gptq")
    layout = config.one_of("checkpoint_format", ("gptq", "gptq_v2"), layout)
    return Packing(layout, _group_rules(config, _gptq_form, GroupForm(0, 128)))


def _gptq_form(config: Section, default: GroupForm) -> GroupForm:
    return GroupForm(
        config.one_of("bits", (4, 8), default.bits or None),
        _group_size(config, default.group_size),
        zero=not config.one_of("sym", (True, False), not default.zero),
        ordered=config.one_of("desc_act", (True, False), default.ordered),
    )


def _group_rules(
    config: Section, form_of: Callable[[Section, GroupForm], GroupForm], default: GroupForm
) -> tuple[Rule, ...]:
    """What AWQ and GPTQ have in common. `form_of`: the form that a section asks for, given the one without it."""
    form = form_of(config, default)
    config.one_of("pack_dtype", ("int32",), "int32")
    rules = not_converted(config)
    if not config.one_of("lm_head", (True, False), False):
        rules.append((HEAD, None))
    for pattern, changes in config.objects("dynamic").items():
        # "-:" leaves modules out, "+:" or nothing gives them other settings
        section = Section(changes, f"quantization_config: dynamic: {pattern}", described_by=MADE_BY)
        own = None if pattern.startswith("-:") else form_of(section, form)
        section.end()
        rules += named([f"re:{pattern[2:] if pattern[:2] in ('-:', '+:') else pattern}"], own)
    only = _modules_in_block(config)
    config.end()
    rules += named(only, form) if only else [(EVERY, form)]
    return tuple(rules)


def _modules_in_block(config: Section) -> list[str]:
    """The modules of a layer that are quantized, in lists of those that were quantized together; empty = all."""
    key = "modules_in_block_to_quantize"
    lists = config.take(key, [])
    found = [names if isinstance(names, list) else [names] for names in lists] if isinstance(lists, list) else [[lists]]
    modules = [name for names in found for name in names]
    if not all(isinstance(name, str) for name in modules):
        raise config.refusal(key, lists, ": must be lists of names")
    return modules


def _group_size(config: Section, default: int) -> int:
    """0 = one group per row, which configs write as -1."""
    size = config.take("group_size", default or -1)
    if size != -1 and not _is_size(size):
        raise config.refusal("group_size", size)
    return max(size, 0)


# --- ModelOpt ---------------------------------------------------------------------------------------------------------


def _modelopt(raw: dict[str, Any]) -> Packing:
    """`raw`: quantization_config, or the content of hf_quant_config.json, which has it under `quantization`.

    Names to leave out are patterns of a shell: * stands for any text. The head of a file without a list is dense.
    """
    of_cache = {"kv_cache_quant_algo", "kv_cache_scheme"}
    config = Section(raw, "quantization_config", described_by=of_cache)
    if "quantization" in raw:
        raw = config.objects("quantization")
        config.end()
        config = Section(raw, "quantization_config: quantization", described_by=of_cache)
    names = config.names("exclude_modules") + config.names("ignore")
    if not raw.keys() & {"exclude_modules", "ignore"}:
        names = ["lm_head"]
    patterns = [translate(text_name(name) + end) for name in names for end in ("", ".*")]
    rules: Rules = [(f"^(?:{'|'.join(patterns)})", None)] if patterns else []
    config.take("config_groups")  # says the same again
    form = MODELOPT[config.one_of("quant_algo", tuple(MODELOPT))](config)
    config.end()
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
    "W4A16_NVFP4": _modelopt_nvfp4,
}


# --- MXFP4 of gpt-oss, bitsandbytes -----------------------------------------------------------------------------------


def _mxfp4(raw: dict[str, Any]) -> Packing:
    """Only experts are packed."""
    config = Section(raw, "quantization_config")
    kept = not_converted(config)
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
