"""Checkpoints of mixed precision: parts of fused linears that have different forms, by groups of the config."""

from pathlib import Path
from typing import Any

from torch import Tensor

from tests.helpers import open_llm
from tests.weights.packed_files import check_greedy, check_plan, write_packed
from tests.weights.test_fp4 import FOUR_BITS, pack_nv
from tests.weights.test_fp8 import EIGHT_BITS, pack_rows
from tests.weights.test_groups import pack_compressed
from tests.weights.test_ranks import check_ranks

INT = {"type": "int", "symmetric": True}


def group(layout: str, weights: dict[str, Any], *targets: str) -> dict[str, Any]:
    return {"targets": list(targets), "weights": weights, "input_activations": None, "format": layout}


# The group for all linears comes first, as llm-compressor may write it, and counts last. k projections, and up
# projections of the second layer, stay dense.
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "mixed-precision",
    "ignore": ["lm_head", "re:.*k_proj", "model.layers.1.mlp.up_proj"],
    "config_groups": {
        "group_0": group("nvfp4-pack-quantized", FOUR_BITS | {"strategy": "tensor_group", "group_size": 16}, "Linear"),
        "group_1": group("float-quantized", EIGHT_BITS | {"strategy": "channel"}, "re:.*self_attn.q_proj"),
        "group_2": group(
            "pack-quantized", INT | {"num_bits": 4, "strategy": "group", "group_size": 16}, "re:.*(v|gate)_proj$"
        ),
        "group_3": group("pack-quantized", INT | {"num_bits": 8, "strategy": "channel"}, "model.layers.2.mlp.up_proj"),
    },
}


def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
    if module == "lm_head" or module.endswith(("k_proj", "layers.1.mlp.up_proj")):
        return None
    if module.endswith("q_proj"):
        return pack_rows(module, weight)
    if module.endswith(("v_proj", "gate_proj")):
        return pack_compressed(weight)
    if module == "model.layers.2.mlp.up_proj":
        return pack_compressed(weight, bits=8, size=0)
    return pack_nv(module, weight)


def test_parts_of_fused_linears(tmp_path: Path) -> None:
    files = write_packed("llama", tmp_path, pack, CONFIG)
    check_greedy(files)
    check_plan(files)
    check_ranks(files.packed, (2, 1), (1, 2))
    with open_llm(files.packed) as llm:
        layers = llm.llm_engine._core.executor.model.layers
        qkv = [[part.format_name for part in layer.mixer.qkv_proj.weight.weights] for layer in layers]
        gate_up = [[part.format_name for part in layer.feed_forward.gate_up_proj.weight.weights] for layer in layers]
        assert qkv == [["fp8", "dense", "int4_groups"]] * 3
        assert gate_up == [["int4_groups", other] for other in ("nvfp4", "dense", "int8_groups")]
        assert {layer.mixer.o_proj.weight.format_name for layer in layers} == {"nvfp4"}
