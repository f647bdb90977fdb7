"""`quantization_config` as popular checkpoints on the Hugging Face hub have it: read, or refused with the key."""

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nanovllm.checkpoint.packed.config import read_packing
from nanovllm.errors import CheckpointError
from nanovllm.models.registry import describe
from nanovllm.weights.forms import Form, Fp4Form, Fp8Form, GroupForm, Int8Form, Packing
from tests.helpers import model_dir

Config = dict[str, Any]
HEAD, Q, UP, DOWN = (
    "lm_head",
    "model.layers.0.self_attn.q_proj",
    "model.layers.3.mlp.up_proj",
    "model.layers.3.mlp.down_proj",
)
GATE, EXPERT = "model.layers.1.mlp.gate", "model.layers.3.mlp.experts.7.up_proj"

# --- what writes them -------------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
LAYER_PARTS = ("input_layernorm", "mlp.gate", "post_attention_layernorm")
QWEN3_MOE_KEPT = ["lm_head", *(f"model.layers.{layer}.{part}" for layer in range(48) for part in LAYER_PARTS)]
TRANSFORMERS_FP8: Config = {"quant_method": "fp8", "modules_to_not_convert": None, "modules_to_convert": None}
TRANSFORMERS_FP8 |= {"activation_scheme": "dynamic", "weight_block_size": [128, 128], "dequantize": False}
TRANSFORMERS_FP8 |= {"scale_fmt": "float", "expert_dtype": "fp8"}

CT_ANY: Config = {
    "actorder": None,
    "block_structure": None,
    "group_size": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
CT_FLOAT = CT_ANY | {"dynamic": False, "num_bits": 8, "strategy": "channel", "symmetric": True, "type": "float"}
CT_TOKENS = CT_FLOAT | {"dynamic": True, "observer": None, "strategy": "token"}
CT_INT = CT_FLOAT | {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "observer": "mse"}
CT_FP4 = CT_FLOAT | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "observer": "static_minmax"}
CT_FP4 |= {"scale_dtype": "torch.float8_e4m3fn", "zp_dtype": None}
CT_BLOCKS = {"strategy": "block", "block_structure": [128, 128]}


def compressed(layout: str, *groups: Config, **more: Any) -> Config:
    """As llm-compressor writes it; a group is what it says about weights and inputs, and maybe about targets."""
    named = {f"group_{i}": {"output_activations": None, "targets": ["Linear"]} | one for i, one in enumerate(groups)}
    config: Config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": named}
    config |= {"global_compression_ratio": 1.5, "quantization_status": "compressed", "kv_cache_scheme": None}
    config |= {"ignore": ["lm_head"], "sparsity_config": {}, "transform_config": {}, "version": "0.12.2"}
    return config | more


AUTOAWQ = {"quant_method": "awq", "backend": "autoawq", "bits": 4, "do_fuse": False, "exllama_config": None}
AUTOAWQ |= {"fuse_max_seq_len": None, "group_size": 128, "modules_to_fuse": None, "modules_to_not_convert": None}
AUTOAWQ |= {"version": "gemm", "zero_point": True}
OPTIMUM = {"quant_method": "gptq", "bits": 4, "batch_size": 1, "block_name_to_quantize": None, "damp_percent": 0.01}
OPTIMUM |= {"cache_block_outputs": True, "dataset": None, "desc_act": False, "exllama_config": {"version": 1}}
OPTIMUM |= {"group_size": 128, "max_input_length": None, "model_seqlen": None, "tokenizer": None, "pad_token_id": None}
OPTIMUM |= {"module_name_preceding_first_block": None, "modules_in_block_to_quantize": None, "sym": True}
OPTIMUM |= {"true_sequential": True, "use_cuda_fp16": False, "use_exllama": True}
GPTQMODEL = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq", "desc_act": False, "group_size": 128}
GPTQMODEL |= {"lm_head": False, "pack_dtype": "int32", "sym": True, "hyb_act": False}
GPTQMODEL |= {"meta": {"damp_percent": 0.01, "mse": 0.0, "quantizer": ["gptqmodel:4.0.0"], "true_sequential": True}}
GPTQMODEL_7 = GPTQMODEL | {"method": "gptq", "format": "gptq"}
GPTQMODEL_AWQ = GPTQMODEL_7 | {"quant_method": "awq", "method": "awq", "format": "gemm", "checkpoint_format": "gemm"}
GPTQMODEL_AWQ |= {"version": "gemm", "zero_point": False}
# transformers 5 writes all settings of GPTQ for AWQ as well
TRANSFORMERS_GPTQ = OPTIMUM | {"act_group_aware": True, "backend": "auto", "format": "gptq", "meta": None}
TRANSFORMERS_GPTQ |= {"checkpoint_format": "gptq"}
TRANSFORMERS_AWQ = TRANSFORMERS_GPTQ | {"quant_method": "awq", "format": "gemm", "version": "gemm", "zero_point": True}
del TRANSFORMERS_AWQ["checkpoint_format"]
ALL_MODULES = [["self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj"], ["self_attn.o_proj"]]
ALL_MODULES += [["mlp.up_proj", "mlp.gate_proj"], ["mlp.down_proj"]]

FP4_ARGS = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.29.0"}}
MODELOPT |= {"config_groups": {"group_0": {"input_activations": FP4_ARGS, "weights": FP4_ARGS, "targets": ["Linear"]}}}
MODELOPT |= {"ignore": ["lm_head", "model.layers.0.self_attn*"]}
MODELOPT |= {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}
QUANTIZATION = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
HF_QUANT_CONFIG = {"producer": {"name": "modelopt", "version": "0.19.0"}, "quantization": QUANTIZATION}

BITSANDBYTES = {"quant_method": "bitsandbytes", "_load_in_4bit": True, "_load_in_8bit": False, "load_in_4bit": True}
BITSANDBYTES |= {"load_in_8bit": False, "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_quant_storage": "uint8"}
BITSANDBYTES |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "llm_int8_threshold": 6.0}
BITSANDBYTES |= {"llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False}
BITSANDBYTES |= {"llm_int8_skip_modules": ["lm_head", "multi_modal_projector"]}
GPT_OSS_KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

BLOCKS, ROWS, NV, INT4 = Fp8Form((128, 128)), Fp8Form(), Fp4Form(16, has_unit=True), GroupForm(4, 128)
INT8_GROUPS, AWQ_FORM = GroupForm(8, 128), GroupForm(4, 128, zero=True)

# --- which form each module has ---------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[Config, dict[str, Form | None]]] = {
    "Qwen3-30B-A3B-FP8": (
        FP8 | {"modules_to_not_convert": QWEN3_MOE_KEPT},
        {UP: BLOCKS, EXPERT: BLOCKS, HEAD: None, GATE: None},
    ),
    "DeepSeek-V3": (FP8, {UP: BLOCKS, HEAD: None}),
    "DeepSeek-V3.1": (FP8 | {"scale_fmt": "ue8m0"}, {UP: BLOCKS, HEAD: None}),
    "written by transformers, fp8": (TRANSFORMERS_FP8, {UP: BLOCKS, HEAD: None}),
    "MiniMax-M2": (
        FP8 | {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]},
        {UP: BLOCKS, GATE: None, "model.layers.3.mlp.gate_proj": BLOCKS},
    ),
    "Ministral-3-8B-Instruct": (
        {"quant_method": "fp8", "activation_scheme": "static", "dequantize": False, "weight_block_size": None}
        | {"modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]},
        {UP: ROWS, HEAD: None},
    ),
    "AutoFP8 with a KV cache in fp8": (
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
        | {"kv_cache_scheme": "static"},
        {UP: ROWS, HEAD: None},
    ),
    "fp8 that leaves out patterns": (
        FP8 | {"modules_to_not_convert": ["model.language_model.layers.*.self_attn", "lm_head"]},
        {Q: None, UP: BLOCKS, "model.layers.12.self_attn.o_proj": None},
    ),
    "RedHatAI FP8-dynamic": (
        compressed("float-quantized", {"weights": CT_FLOAT, "input_activations": CT_TOKENS}),
        {UP: ROWS, HEAD: None},
    ),
    "RedHatAI FP8": (
        compressed(
            "float-quantized",
            {"weights": CT_FLOAT | {"strategy": "tensor"}, "input_activations": CT_FLOAT | {"strategy": "tensor"}},
            ignore=["language_model.lm_head", "re:vision_tower.*", r"re:.*layers\.0\.self_attn.*"],
            kv_cache_scheme=CT_FLOAT | {"strategy": "tensor"},
        ),
        {UP: ROWS, HEAD: None, Q: None},
    ),
    "RedHatAI FP8-block": (
        compressed(
            "float-quantized",
            {
                "weights": CT_FLOAT | CT_BLOCKS,
                "input_activations": CT_TOKENS | {"strategy": "group", "group_size": 128},
                "format": "float-quantized",
            },
            ignore=["lm_head", "re:.*mlp.gate$"],
        ),
        {UP: BLOCKS, HEAD: None, GATE: None, "model.layers.3.mlp.gate_proj": BLOCKS},
    ),
    "patterns of a model with a vision tower": (
        compressed(
            "pack-quantized",
            {"weights": CT_INT, "input_activations": None},
            ignore=["re:language_model.lm_head", r"re:.*model\.language_model\.layers\.0\..*", "re:model.visual.*"],
        ),
        {UP: INT4, HEAD: None, Q: None},
    ),
    "RedHatAI w4a16": (
        compressed("pack-quantized", {"weights": CT_INT | {"actorder": "weight"}, "input_activations": None}),
        {UP: INT4, HEAD: None},
    ),
    "w4a16 in the order of activations": (
        compressed("pack-quantized", {"weights": CT_INT | {"actorder": "group"}, "input_activations": None}),
        {UP: GroupForm(4, 128, ordered=True)},
    ),
    "w4a16 with zeros": (
        compressed("pack-quantized", {"weights": CT_INT | {"symmetric": False, "group_size": 32}}),
        {UP: GroupForm(4, 32, zero=True)},
    ),
    "w8a16": (
        compressed("pack-quantized", {"weights": CT_INT | {"num_bits": 8, "strategy": "channel", "group_size": None}}),
        {UP: GroupForm(8, 0)},
    ),
    "RedHatAI w8a8": (
        compressed(
            "int-quantized",
            {
                "weights": CT_INT | {"num_bits": 8, "strategy": "channel", "group_size": None},
                "input_activations": CT_TOKENS | {"type": "int"},
            },
        ),
        {UP: Int8Form(), HEAD: None},
    ),
    "RedHatAI NVFP4": (
        compressed(
            "nvfp4-pack-quantized",
            {"weights": CT_FP4, "input_activations": CT_FP4 | {"dynamic": "local"}, "format": "nvfp4-pack-quantized"},
        ),
        {UP: NV, HEAD: None},
    ),
    "NVFP4A16": (compressed("nvfp4-pack-quantized", {"weights": CT_FP4, "input_activations": None}), {UP: NV}),
    "MXFP4 of llm-compressor": (
        compressed(
            "mxfp4-pack-quantized",
            {"weights": CT_FP4 | {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}},
        ),
        {UP: Fp4Form(32)},
    ),
    "mixed precision, the named groups last": (
        compressed(
            "mixed-precision",
            {"weights": CT_FP4, "input_activations": None, "format": "nvfp4-pack-quantized"},
            {"weights": CT_INT, "targets": [DOWN], "format": "pack-quantized"},
            {
                "weights": CT_FLOAT,
                "input_activations": CT_TOKENS,
                "targets": ["re:.*self_attn.*"],
                "format": "float-quantized",
            },
        ),
        {UP: NV, Q: ROWS, DOWN: INT4, HEAD: None},
    ),
    "Qwen3-8B-AWQ": (AUTOAWQ, {UP: AWQ_FORM, HEAD: None}),
    "a vision model in AWQ": (AUTOAWQ | {"modules_to_not_convert": ["visual"]}, {UP: AWQ_FORM, HEAD: None}),
    "AWQ of GPTQModel, symmetric": (GPTQMODEL_AWQ, {UP: INT4, HEAD: None}),
    "written by transformers, AWQ": (TRANSFORMERS_AWQ, {UP: AWQ_FORM, HEAD: None}),
    "Qwen2.5-7B-Instruct-GPTQ-Int4": (OPTIMUM, {UP: INT4, HEAD: None}),
    "Qwen2.5-7B-Instruct-GPTQ-Int8": (OPTIMUM | {"bits": 8}, {UP: INT8_GROUPS, HEAD: None}),
    "written by transformers, GPTQ": (TRANSFORMERS_GPTQ, {UP: INT4, HEAD: None}),
    "all modules are named": (
        OPTIMUM | {"modules_in_block_to_quantize": ALL_MODULES},
        {UP: INT4, DOWN: INT4, Q: INT4, HEAD: None},
    ),
    "some modules are named": (
        OPTIMUM | {"modules_in_block_to_quantize": ["mlp.up_proj", "mlp.down_proj"]},
        {UP: INT4, DOWN: INT4, Q: None, HEAD: None},
    ),
    "TheBloke, actorder": (OPTIMUM | {"desc_act": True}, {UP: GroupForm(4, 128, ordered=True)}),
    "Qwen3-30B-A3B-GPTQ-Int4": (
        GPTQMODEL | {"dynamic": {r"-:.*\.mlp\.gate$": {}}},
        {UP: INT4, EXPERT: INT4, GATE: None, HEAD: None},
    ),
    "GPTQModel 7": (GPTQMODEL_7, {UP: INT4, HEAD: None}),
    "dynamic": (
        GPTQMODEL
        | {
            "dynamic": {
                r"-:.*\.self_attn\..*": {},
                r"+:.*\.3\.mlp\.down_proj": {"bits": 8, "group_size": 32, "damp_percent": 0.1, "mse": 2.4},
                r".*\.mlp\..*": {"desc_act": True},
                r".*": {"bits": 8},
            }
        },
        {
            Q: None,
            DOWN: GroupForm(8, 32),
            UP: GroupForm(4, 128, ordered=True),
            HEAD: None,
            "model.layers.3.moe.up": INT8_GROUPS,
        },
    ),
    "GPTQ with a packed head": (GPTQMODEL | {"lm_head": True}, {UP: INT4, HEAD: INT4}),
    "nvidia FP8, a file of its own": (HF_QUANT_CONFIG | {"quant_method": "modelopt"}, {UP: ROWS, HEAD: None}),
    "nvidia FP8, no list of dense modules": (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}},
        {UP: ROWS, HEAD: None},
    ),
    "nvidia NVFP4": (MODELOPT, {UP: NV, Q: None, HEAD: None, "model.layers.10.self_attn.q_proj": NV}),
    "nvidia NVFP4 of a vision model": (
        MODELOPT | {"ignore": ["model.language_model.layers.0.self_attn*", "language_model.lm_head", "model.visual*"]},
        {UP: NV, Q: None, HEAD: None},
    ),
    "nvidia W4A16": (MODELOPT | {"quant_algo": "W4A16_NVFP4"}, {UP: NV}),
    "gpt-oss-20b": (
        {"quant_method": "mxfp4", "modules_to_not_convert": GPT_OSS_KEPT},
        {EXPERT: Fp4Form(32), UP: None, Q: None, HEAD: None},
    ),
    "unsloth bnb-4bit": (BITSANDBYTES, {UP: None}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_forms(name: str) -> None:
    config, expected = CONFIGS[name]
    packing = read_packing(config)
    assert {module: packing.form_of(module) for module in expected} == expected


REFUSED: dict[str, tuple[Config, str]] = {
    "embedding in fp8": (TRANSFORMERS_FP8 | {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert="),
    "experts in fp4": (TRANSFORMERS_FP8 | {"expert_dtype": "fp4"}, "expert_dtype='fp4' cannot be read; known: 'fp8'"),
    "another type of scales": (FP8 | {"scale_fmt": "ue5m3"}, "scale_fmt='ue5m3' cannot be read"),
    "names of fused linears": (FP8 | {"packed_modules_mapping": {"qkv_proj": ["q_proj"]}}, "packed_modules_mapping="),
    "bits are not stated": ({**GPTQMODEL, "bits": None}, "bits=None cannot be read"),
    "AWQ of 8 bits": (AUTOAWQ | {"bits": 8}, "bits=8 cannot be read; known: 4"),
    "AWQ in another layout": (TRANSFORMERS_AWQ | {"format": "gemv"}, "format='gemv' cannot be read"),
    "AWQ in the order of activations": (TRANSFORMERS_AWQ | {"desc_act": True}, "desc_act=True cannot be read"),
    "AWQ with 8 bits in some modules": (GPTQMODEL_AWQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic: .*bits=8"),
    "AWQ's layout in GPTQ": (GPTQMODEL_7 | {"checkpoint_format": "gemm"}, "checkpoint_format='gemm' cannot be read"),
    "rotated": (GPTQMODEL_7 | {"rotation": "hadamard"}, "rotation='hadamard' cannot be read"),
    "inputs in 4 bits": (GPTQMODEL_7 | {"activation": {"mode": "w4a_nvfp4"}}, "activation=.* cannot be read"),
    "words of 64 bits": (GPTQMODEL | {"pack_dtype": "int64"}, "pack_dtype='int64' cannot be read"),
    "marlin": (GPTQMODEL | {"is_marlin_format": True}, "is_marlin_format=True cannot be read"),
    "names that are none": (OPTIMUM | {"modules_in_block_to_quantize": [[3]]}, "must be lists of names"),
    "a group without targets": (compressed("float-quantized", {"weights": CT_FLOAT, "targets": []}), "targets="),
    "rows in groups": (
        compressed("pack-quantized", {"weights": CT_INT | {"strategy": "channel"}}),
        "group_size=128 cannot be read; known: None",
    ),
    "a KV cache alone": (compressed("float-quantized", {"weights": None}), "weights=None: must be a JSON object"),
    "sparse": (compressed("sparse-24-bitmask", {"weights": CT_FLOAT}), "type='float' cannot be read of 8 bits"),
    "int4 with 8-bit inputs": (
        compressed("pack-quantized", {"weights": CT_INT, "input_activations": CT_TOKENS}),
        "and input_activations",
    ),
    "inputs with zeros": (
        compressed(
            "int-quantized",
            {
                "weights": CT_INT | {"num_bits": 8, "strategy": "channel", "group_size": None},
                "input_activations": CT_TOKENS | {"type": "int", "symmetric": False},
            },
        ),
        "input_activations: symmetric=False cannot be read",
    ),
    "a flag in a pattern": (GPTQMODEL | {"dynamic": {"-:(?i).*GATE": {}}}, "is not a regular expression"),
    "mixed precision of ModelOpt": (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, "quant_algo='MIXED_PRECISION'"),
    "AWQ of ModelOpt": (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, "quant_algo='NVFP4_AWQ' cannot be read"),
    "bitsandbytes of 8 bits": (BITSANDBYTES | {"load_in_4bit": False, "load_in_8bit": True}, "load_in_4bit=False"),
    "bitsandbytes fp4": (BITSANDBYTES | {"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4' cannot be read"),
    "AutoRound": ({"quant_method": "auto-round", "bits": 4}, "quant_method='auto-round' cannot be read; known: "),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_key(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(CheckpointError, match=message):
        read_packing(config)


# --- damaged configs --------------------------------------------------------------------------------------------------

STRANGE: tuple[Any, ...] = (None, [], {}, "strange", 7, -1, 1.5, True, [["strange"]], [7], {"strange": 7})
# Keys whose value changes nothing here: they describe how a file was made, or inputs and the KV cache
DESCRIPTIONS = {
    *("quantization_status", "global_compression_ratio", "producer", "version", "meta", "observer", "observer_kwargs"),
    *("dynamic", "scale_dtype", "zp_dtype", "damp_percent", "mse", "true_sequential", "sparsity_config"),
    *("kv_cache_scheme", "kv_cache_quant_algo", "backend", "do_fuse", "exllama_config", "fuse_max_seq_len", "hyb_act"),
    *("modules_to_fuse", "batch_size", "block_name_to_quantize", "cache_block_outputs", "dataset", "max_input_length"),
    *("model_seqlen", "module_name_preceding_first_block", "pad_token_id", "tokenizer", "use_cuda_fp16", "use_exllama"),
    *("act_group_aware", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype", "bnb_4bit_quant_storage"),
    *("bnb_4bit_use_double_quant", "llm_int8_threshold", "llm_int8_enable_fp32_cpu_offload"),
    *("llm_int8_has_fp16_weight", "llm_int8_skip_modules"),
}
GRANULARITY = {"strategy", "group_size", "block_structure", "actorder", "symmetric", "num_bits", "type"}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value in a config."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(config: Config, path: tuple[Any, ...], value: Any) -> Config:
    config = copy.deepcopy(config)
    inner: Any = config
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return config


def outcome(config: Any) -> Packing | None:
    """None: it was refused."""
    try:
        packing = read_packing(config)
    except CheckpointError:
        return None
    for module in (HEAD, Q, UP, DOWN, EXPERT):
        packing.form_of(module)
    return packing


def once_each() -> Iterator[tuple[Config, tuple[Any, ...]]]:
    """The place of every value in the configs, only one of those that are read by the same lines."""
    seen = set()
    for config, _ in CONFIGS.values():
        for path in places(config):
            kind = (config["quant_method"], config.get("format"), path)
            if kind not in seen:
                yield config, path
            seen.add(kind)


def matters(config: Config, path: tuple[Any, ...]) -> bool:
    if DESCRIPTIONS & set(path):
        return False
    if config["quant_method"] == "modelopt":
        return path[0] != "config_groups"  # quant_algo says the same
    if "input_activations" in path:  # each token gets its own scale, and inputs are not rounded to 4 bits
        return not GRANULARITY & set(path)
    groups = config.get("config_groups", {}).values()
    return path != ("format",) or not all("format" in group for group in groups)


def test_strange_values_are_read_or_refused() -> None:
    """Whatever a value is replaced with: no other exception, and every form can be computed with."""
    for config, path in once_each():
        for value in STRANGE:
            packing = outcome(changed(config, path, value))
            for form in packing.forms if packing is not None else ():
                assert not isinstance(form, GroupForm) or (form.bits in (4, 8) and type(form.group_size) is int)


def test_no_value_that_matters_is_ignored() -> None:
    """A value that nobody knows is refused, or changes the result: a name, for example."""
    for config, path in once_each():
        if matters(config, path):
            assert outcome(changed(config, path, "strange")) != read_packing(config), path


def test_a_key_that_is_not_known_is_refused_wherever_it_is() -> None:
    for config, path in (*((config, ()) for config, _ in CONFIGS.values()), *once_each()):
        inner: Any = config
        for key in path:
            inner = inner[key]
        if not isinstance(inner, dict) or path in (("config_groups",), ("dynamic",)):  # their keys are names
            continue
        if not path or (matters(config, path) and "input_activations" not in path):
            assert outcome(changed(config, (*path, "strange"), "x")) is None, path


# --- in a model's folder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_where_a_config_is_found(tmp_path: Path, key: str) -> None:
    """compression_config: what the first versions of compressed-tensors wrote."""
    raw = json.loads((model_dir("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {key: CONFIGS["RedHatAI w4a16"][0]}))
    packing = describe(tmp_path).config.packing
    assert packing is not None and packing.form_of(UP) == GroupForm(4, 128, scale_dtype="float32")


@pytest.mark.parametrize("content", [{}, {"quantization": []}, {"quantization": {}}, {"quantization": "FP8"}])
def test_a_file_of_modelopt_that_says_nothing(tmp_path: Path, content: Config) -> None:
    (tmp_path / "config.json").write_text((model_dir("llama") / "config.json").read_text())
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="quantization_config"):
        describe(tmp_path)


def test_long_lists_of_names_take_no_time() -> None:
    """18,432 modules and 145 names took 80 s, when each name was a regular expression."""
    packing = read_packing(CONFIGS["Qwen3-30B-A3B-FP8"][0])
    experts = [f"model.layers.{layer}.mlp.experts.{expert}" for layer in range(48) for expert in range(128)]
    start = time.process_time()
    assert all(
        packing.form_of(f"{expert}.{part}_proj") == BLOCKS for expert in experts for part in ("gate", "up", "down")
    )
    assert time.process_time() - start < 5
