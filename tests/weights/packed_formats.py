"""A small checkpoint of every packed format that safetensors files have."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.weights import test_fp4, test_fp8, test_gpt_oss, test_groups, test_int8_inputs, test_nf4
from tests.weights.packed_files import Pack, PackedFiles, write_packed


def but_the_head(pack: Callable[..., Any], **settings: Any) -> Pack:
    return lambda module, weight: None if module == "lm_head" else pack(weight, **settings)


FORMATS: dict[str, Callable[[Path], PackedFiles]] = {
    "fp8 blocks": lambda folder: write_packed("qwen3", folder, test_fp8.pack_blocks, test_fp8.BLOCKS),
    "fp8 rows": lambda folder: write_packed("llama", folder, test_fp8.pack_rows, test_fp8.COMPRESSED),
    "fp8 tensor": lambda folder: write_packed("llama", folder, test_fp8.pack_whole, test_fp8.FP8),
    "int8": lambda folder: write_packed("llama", folder, test_int8_inputs.pack, test_int8_inputs.W8A8),
    "nvfp4": lambda folder: write_packed("llama", folder, test_fp4.pack_nv, test_fp4.NV),
    "nvfp4 of ModelOpt": lambda folder: write_packed("llama", folder, test_fp4.pack_modelopt, test_fp4.MODELOPT),
    "mxfp4": lambda folder: write_packed("qwen3-moe-wide", folder, test_fp4.pack_mx, test_fp4.MX),
    "mxfp4 of gpt-oss": test_gpt_oss.write,
    "nf4": lambda folder: write_packed("qwen3", folder, but_the_head(test_nf4.pack, nested=False), test_nf4.CONFIG),
    "nf4 nested": lambda folder: write_packed(
        "qwen3", folder, but_the_head(test_nf4.pack, nested=True), test_nf4.CONFIG
    ),
} | {
    case: lambda folder, case=case: test_groups.write(case, folder, "qwen3")  # type: ignore[misc]
    for case in ("awq", "gptq", "gptq ordered", "gptq 2", "gptq 8", "packed asymmetric", "packed 8", "packed ordered")
}
