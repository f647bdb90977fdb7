"""Tensors that checkpoints store as one, with rows in another order: packed ones give the dense model's tokens."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.checkpoint.packed.fp8 import quantize_fp8
from nanovllm.checkpoint.packed.groups import quantize_groups
from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.checkpoint.reordered import Reordered, reorder
from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import GroupForm
from tests.helpers import open_llm
from tests.weights import test_groups
from tests.weights.packed_files import check_greedy, write_packed
from tests.weights.test_fp8 import WEIGHT_ONLY, WEIGHT_ONLY_BLOCKS, pack_blocks, pack_rows, pack_whole

FAMILY = "phi4-mini"


@pytest.mark.parametrize(
    ("pack", "config"),
    [(pack_blocks, WEIGHT_ONLY_BLOCKS), (pack_rows, WEIGHT_ONLY), (pack_whole, WEIGHT_ONLY)],
)
def test_fp8(tmp_path: Path, pack: Any, config: dict[str, Any]) -> None:
    check_greedy(write_packed(FAMILY, tmp_path, pack, config))


@pytest.mark.parametrize("family", [FAMILY, "glm4"])
@pytest.mark.parametrize("case", ["awq", "gptq", "gptq ordered", "packed asymmetric"])
def test_groups_of_columns(tmp_path: Path, case: str, family: str) -> None:
    check_greedy(test_groups.write(case, tmp_path, family))


def test_made_while_loading(tmp_path: Path) -> None:
    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """The file has the weight itself, and the dense model what becomes of it."""
        form = GroupForm(4, math.gcd(128, weight.shape[1]), zero=True)
        return {"weight": weight}, quantize_groups(weight, form).read()

    check_greedy(write_packed(FAMILY, tmp_path, pack, {}), quantization="int4")


@pytest.mark.parametrize("part", [(), (slice(2, 5),), (slice(0, 6), slice(1, 3)), (slice(3, 3),)])
def test_reordered(part: tuple[slice, ...]) -> None:
    tensor, order = torch.arange(24).view(6, 4), (1, 0, 5, 3, 4, 2)
    assert torch.equal(Reordered(InMemory(tensor), order).read(part), tensor[list(order)][part])


def test_blocks_that_share_a_scale_are_not_divided() -> None:
    stored = quantize_fp8(torch.randn(8, 8), (4, 4))
    assert torch.equal(reorder(stored, (1, 0, 2, 3, 7, 6, 5, 4)).read(), stored.read()[[1, 0, 2, 3, 7, 6, 5, 4]])
    with pytest.raises(ValueError, match="blocks of 4 rows share a scale"):
        reorder(stored, (4, 1, 2, 3, 0, 5, 6, 7))


def test_wrong_shape(tmp_path: Path) -> None:
    files = write_packed(FAMILY, tmp_path, lambda module, weight: ({"weight": weight[:-1]}, weight), {})
    with pytest.raises(CheckpointError, match=r"gate_up_proj.weight has shape \[159, 64\], .* asks for \[160, 64\]"):
        open_llm(files.packed)
