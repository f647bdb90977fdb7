"""bitsandbytes' 4-bit weights are unpacked, and a notice says so."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.errors import CheckpointError
from tests.helpers import edit_config, open_llm
from tests.weights.packed_files import check_greedy, write_packed

BLOCK, NESTED = 64, 4
STATE = "weight.quant_state.bitsandbytes__nf4"
TABLE = torch.tensor([-1, -0.7, -0.53, -0.39, -0.28, -0.18, -0.09, 0, 0.08, 0.16, 0.25, 0.34, 0.44, 0.56, 0.72, 1])
CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
CONFIG |= {"bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16", "llm_int8_threshold": 6.0}


def pack(weight: Tensor, *, nested: bool) -> tuple[dict[str, Tensor], Tensor]:
    blocks = torch.nn.functional.pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(dim=1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": BLOCK, "dtype": "float32", "shape": list(weight.shape)}
    stored = {"weight.absmax": largest, "weight.quant_map": TABLE.clone()}
    if nested:
        offset = float(largest.mean())
        table = torch.linspace(-1, 1, 256)
        nested_largest = torch.stack([part.abs().max() for part in (largest - offset).split(NESTED)])
        scale = nested_largest.repeat_interleave(NESTED)[: len(largest)]
        codes = ((largest - offset)[:, None] / scale[:, None] - table).abs().argmin(dim=1)
        largest = table[codes] * scale + offset
        state |= {"nested_blocksize": NESTED, "nested_dtype": "float32", "nested_offset": offset}
        stored |= {"weight.absmax": codes.to(torch.uint8), "weight.nested_absmax": nested_largest}
        stored["weight.nested_quant_map"] = table
    codes = (blocks[..., None] / largest[:, None, None] - TABLE).abs().argmin(dim=-1)
    flat = codes.flatten()[: weight.numel()].to(torch.uint8)
    stored["weight"] = (flat[::2] << 4 | flat[1::2])[:, None]
    stored[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    dense = (TABLE[codes] * largest[:, None]).flatten()[: weight.numel()].view(weight.shape)
    return stored, dense


@pytest.mark.parametrize("nested", [False, True])
def test_weights_are_unpacked(tmp_path: Path, nested: bool, caplog: pytest.LogCaptureFixture) -> None:
    files = write_packed(
        "qwen3", tmp_path, lambda module, w: None if module == "lm_head" else pack(w, nested=nested), CONFIG
    )
    with caplog.at_level(logging.WARNING, logger="nanovllm"):
        check_greedy(files)
    assert "4-bit weights are unpacked" in caplog.text


@pytest.mark.parametrize(
    ("own", "change", "message"),
    [
        ("weight.absmax", lambda t: None, "weight.absmax is missing"),
        ("weight.absmax", lambda t: t[:-1], "blocks do not all have a finite largest value"),
        ("weight.absmax", lambda t: t * float("inf"), "blocks do not all have a finite largest value"),
        ("weight", lambda t: t[:-1], "bytes do not hold a weight of"),
        (STATE, lambda t: t[:-1], "bitsandbytes__nf4 cannot be read"),
    ],
)
def test_bad_files(tmp_path: Path, own: str, change: Any, message: str) -> None:
    def damaged(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        stored, dense = pack(weight, nested=False)
        if module.endswith("1.mlp.up_proj"):
            changed = change(stored.pop(own))
            stored |= {} if changed is None else {own: changed}
        return stored, dense

    files = write_packed("qwen3", tmp_path, damaged, CONFIG)
    with pytest.raises(CheckpointError, match=f"1.mlp.up_proj.*{message}"):
        open_llm(files.packed)


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    files = write_packed("qwen3", tmp_path, lambda module, w: None, CONFIG)
    for changes, message in (
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type='fp4' cannot be read"),
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_4bit=False cannot be read"),
    ):
        edit_config(files.packed, lambda raw, c=changes: raw.update(quantization_config=CONFIG | c))
        with pytest.raises(CheckpointError, match=message):
            open_llm(files.packed)
