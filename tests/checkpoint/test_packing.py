"""`quantization_config`: which form each module has, and which configs are refused, with the key in question."""

from typing import Any

import pytest

from nanovllm.checkpoint.packed.config import read_packing
from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import Form, Fp4Form, Fp8Form, GroupForm, Int8Form

MODULE = "model.layers.3.mlp.up_proj"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
FLOAT = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "observer": "minmax"}
INT = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False}
ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True, "desc_act": False, "quantizer": "x"}
TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    layout = "pack-quantized" if weights["type"] == "int" else "float-quantized"
    config = {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}
    return (
        config
        | {"ignore": ["lm_head"], "quantization_status": "compressed", "version": "0.12", "kv_cache_scheme": None}
        | settings
    )


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FP8, Fp8Form()),
        (FP8 | {"weight_block_size": [128, 128]}, Fp8Form((128, 128))),
        (compressed(FLOAT, TOKENS), Fp8Form()),
        (compressed(FLOAT | {"strategy": "tensor"}), Fp8Form(rounds_inputs=False)),
        (compressed(FLOAT | {"strategy": "block", "block_structure": [128, 128]}, TOKENS), Fp8Form((128, 128))),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, Fp8Form()),
        (AWQ, GroupForm(4, 128, zero=True)),
        (GPTQ, GroupForm(4, 128)),
        (GPTQ | {"bits": 8, "desc_act": True, "sym": False, "group_size": -1}, GroupForm(8, 0, True, True)),
        (GPTQ | {"dynamic": {r"+:.*up_proj": {"bits": 8, "group_size": 32}}}, GroupForm(8, 32)),
        (GPTQ | {"dynamic": {r".*down_proj": {"bits": 8}}}, GroupForm(4, 128)),
        (compressed(INT), GroupForm(4, 32)),
        (
            compressed(INT | {"num_bits": 8, "strategy": "channel", "group_size": None, "symmetric": False}),
            GroupForm(8, 0, zero=True),
        ),
        (compressed(INT | {"actorder": "group"}), GroupForm(4, 32, ordered=True)),
        (compressed(INT | {"actorder": "weight"}), GroupForm(4, 32)),
        (compressed(ROWS, TOKENS | {"type": "int"}, format="int-quantized"), Int8Form()),
        (compressed(ROWS, format="naive-quantized"), Int8Form(rounds_inputs=False)),
        (compressed(FP4, FP4, format="nvfp4-pack-quantized"), Fp4Form(16, has_unit=True)),
        (compressed(FP4 | {"group_size": 32}, format="mxfp4-pack-quantized"), Fp4Form(32)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}, Fp4Form(16, has_unit=True)),
    ],
)
def test_forms(config: dict[str, Any], expected: Form) -> None:
    packing = read_packing(config)
    assert packing.form_of(MODULE) == expected and packing.form_of("lm_head") is None


def test_layouts_of_gptq() -> None:
    assert read_packing(GPTQ).layout == read_packing(GPTQ | {"checkpoint_format": "gptq"}).layout == "gptq"
    assert read_packing(GPTQ | {"checkpoint_format": "gptq_v2"}).layout == "gptq_v2"
    assert read_packing(GPTQ | {"format": "gptq_v2"}).layout == "gptq_v2"


@pytest.mark.parametrize(
    ("config", "module", "is_packed"),
    [
        (FP8 | {"modules_to_not_convert": ["mlp.up_proj"]}, MODULE, False),
        (FP8 | {"modules_to_not_convert": ["up"]}, MODULE, True),
        (FP8 | {"modules_to_not_convert": ["model.layers.3"]}, MODULE, False),
        (FP8 | {"modules_to_not_convert": ["model.layers.3"]}, "model.layers.31.mlp.up_proj", True),
        (FP8 | {"ignored_layers": [MODULE]}, MODULE, False),
        (AWQ | {"modules_to_not_convert": ["mlp.gate"]}, "model.layers.3.mlp.gate", False),
        (AWQ | {"modules_to_not_convert": ["mlp.gate"]}, "model.layers.3.mlp.gate_proj", True),
        (AWQ | {"modules_to_not_convert": ["mlp.gate."]}, "model.layers.3.mlp.gate", False),
        (GPTQ | {"lm_head": True}, "lm_head", True),
        ({"quant_method": "mxfp4"}, MODULE, False),
        ({"quant_method": "mxfp4"}, "model.layers.3.mlp.experts.0.up_proj", True),
        (GPTQ | {"dynamic": {r"-:.*\.mlp\..*": {}}}, MODULE, False),
        (compressed(FLOAT, ignore=["re:.*mlp.*"]), MODULE, False),
        (compressed(FLOAT, ignore=["re:mlp.*"]), MODULE, True),
        (compressed(FLOAT, ignore=[]), "lm_head", True),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["*.mlp*"]}, MODULE, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["model.layers.3"]}, MODULE, False),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "exclude_modules": ["model.layers.[45]*"]}, MODULE, True),
    ],
)
def test_modules_that_are_left_out(config: dict[str, Any], module: str, is_packed: bool) -> None:
    assert (read_packing(config).form_of(module) is not None) == is_packed


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", "quantization_config=.fp8.: must be a JSON object"),
        ({}, "quant_method=None cannot be read"),
        ({"quant_method": "hqq"}, "quant_method='hqq' cannot be read; known: "),
        (FP8 | {"fmt": "e5m2"}, "fmt='e5m2' cannot be read; known: 'e4m3'"),
        (FP8 | {"activation_scheme": "token"}, "activation_scheme='token' cannot be read"),
        (FP8 | {"weight_block_size": [128]}, r"weight_block_size=\[128\] cannot be read: must be two sizes"),
        (FP8 | {"modules_to_not_convert": "lm_head"}, "modules_to_not_convert='lm_head' cannot be read"),
        (FP8 | {"scale_shape": "ue8m0"}, "scale_shape='ue8m0' cannot be read: the key is not known"),
        (compressed(FLOAT | {"num_bits": 3}), "group_0: weights: num_bits=3 cannot be read with type='float'"),
        (compressed(FLOAT | {"strategy": "group"}), "weights: strategy='group' cannot be read; known: 'tensor'"),
        (compressed(FLOAT | {"strategy": "block"}), "block_structure=None cannot be read with strategy='block'"),
        (compressed(FLOAT | {"rotation": 1}), "weights: rotation=1 cannot be read: the key is not known"),
        (compressed(FLOAT, TOKENS | {"num_bits": 4}), "input_activations: num_bits=4 cannot be read"),
        (compressed(FLOAT, ignore=["re:("]), "'re:\\(' is not a regular expression"),
        (compressed(FLOAT, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config=.* cannot be read"),
        (compressed(FLOAT, transform_config={"config_groups": {"R1": {}}}), "transform_config=.* cannot be read"),
        (compressed(FLOAT, config_groups={}), "config_groups={} cannot be read"),
        (AWQ | {"version": "gemv"}, "version='gemv' cannot be read; known: 'gemm'"),
        (AWQ | {"zero_point": "no"}, "zero_point='no' cannot be read"),
        (GPTQ | {"bits": 3}, "bits=3 cannot be read; known: 4, 8"),
        (GPTQ | {"group_size": 0}, "group_size=0 cannot be read"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' cannot be read"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, r"dynamic: \+:.*: bits=2 cannot be read"),
        (compressed(INT, TOKENS), "weights: type='int' cannot be read with format='pack-quantized' and input_act"),
        (compressed(ROWS, TOKENS, format="int-quantized"), "input_activations: type='float' cannot be read"),
        (
            compressed(ROWS, ROWS | {"symmetric": False}, format="int-quantized"),
            "inputs?_act.*: symmetric=False cannot",
        ),
        (compressed(FLOAT, TOKENS | {"rotation": 1}), "input_activations: rotation=1 cannot be read: the key is not"),
        (compressed(FP4), "num_bits=4 cannot be read with type='float' and format='float-quantized'"),
        (compressed(FP4 | {"group_size": 8}, format="nvfp4-pack-quantized"), "group_size=8 cannot be read; known: 16"),
        ({"quant_method": "mxfp4", "rotation": 1}, "rotation=1 cannot be read: the key is not known"),
        (compressed(INT | {"actorder": "row"}), "actorder='row' cannot be read"),
        (compressed(INT | {"group_size": None}), "group_size=None cannot be read"),
        ({"quant_method": "modelopt", "quant_algo": "INT4_AWQ"}, "quant_algo='INT4_AWQ' cannot be read"),
    ],
)
def test_refused(config: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_packing(config)
