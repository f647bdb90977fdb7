"""docs/quantization.md says which kernels serve the packed weights of Qwen3-8B on Hopper: what the table chooses."""

import re
from pathlib import Path
from typing import Any

import pytest

from nanovllm.kernels.select import LinearCase, select_linear

DOCUMENT = Path(__file__).parents[2] / "docs" / "quantization.md"
PIECE = re.compile(r"(?:(?P<first>[\d,]+)(?:–(?P<last>[\d,]+))?(?: rows?)?|more) `(?P<kernel>\w+)`")
HIDDEN, INTERMEDIATE, QKV = 4096, 12288, 6144
MOST_ROWS = 5000
LINEARS = {  # outputs, inputs, gated, added
    "qkv": (QKV, HIDDEN, False, False),
    "o": (HIDDEN, HIDDEN, False, True),
    "gate and up": (2 * INTERMEDIATE, HIDDEN, True, False),
    "down": (HIDDEN, INTERMEDIATE, False, True),
}
FP8: dict[str, Any] = dict(distance=64, rounds_inputs=True)
FORMATS: dict[str, dict[str, Any]] = {
    "int4 in groups of 128": dict(format="int4_groups", distance=64, group=128),
    "int8": dict(format="int8_groups", distance=64),
    "fp8, a scale per row": dict(format="fp8", **FP8),
    "fp8, a scale per block": dict(format="fp8_block", group=128, scale_rows=128, **FP8),
    "MXFP4": dict(format="mxfp4", distance=32, group=32),
    "Q4_K": dict(format="int4_groups", distance=32, group=32, minimum=True),
    "NVFP4": dict(format="nvfp4", distance=16, group=16),
}


FAMILY = {"packed_many_rows": "packed_dequantized", "packed_split_k": "packed_tiled"}


def chosen(format: str, linear: str, rows: int) -> str:
    """Without what the name says of sums, and of how the product of an unpacked weight is computed."""
    outputs, inputs, gated, added = LINEARS[linear]
    sizes = dict(rows=rows, outputs=outputs, inputs=inputs, gated=gated, added=added, group=inputs)
    device = dict(half=True, bfloat16=True, gluon=True, whole=True, bias=False, deterministic=False)
    kernel = select_linear(LinearCase(**{**sizes, **device, **FORMATS[format]}))
    assert kernel is not None
    return FAMILY.get(kernel.name, re.sub("_(split_k|sum)$", "", kernel.name))


def documented() -> dict[str, str]:
    table = DOCUMENT.read_text().split("<!-- kernels -->")[1].split("<!-- end of kernels -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.strip().splitlines()[2:]]
    return {format: kernels for format, kernels in rows}


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_all_formats_are_documented() -> None:
    assert list(documented()) == list(FORMATS)


@pytest.mark.parametrize("format", FORMATS)
def test_documented_kernels(format: str) -> None:
    text, _, of_gate = documented()[format].partition(", gate and up ")
    next_row = 1
    for piece in PIECE.finditer(text):
        if piece["first"]:
            assert number(piece["first"]) == next_row, piece[0]
        last = number(piece["last"] or piece["first"]) if piece["first"] else MOST_ROWS
        kernels = dict.fromkeys(LINEARS, piece["kernel"])
        if of_gate and last == MOST_ROWS:
            kernels["gate and up"] = of_gate.strip("`")
        for rows in range(next_row, last + 1):
            assert {linear: chosen(format, linear, rows) for linear in LINEARS} == kernels, rows
        next_row = last + 1
    assert next_row == MOST_ROWS + 1
