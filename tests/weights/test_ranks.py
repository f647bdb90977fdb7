"""What each rank holds of a packed checkpoint: the bytes that a plan counts, and the weights of the whole model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm.checkpoint.dummy import load_dummy
from nanovllm.config import Config
from nanovllm.distributed.group import Group, Parallel, Rank
from nanovllm.engine.weight_bytes import weight_bytes
from nanovllm.models.registry import describe
from nanovllm.runner.model_runner import ModelRunner
from tests.helpers import model_dir
from tests.weights import test_gguf_groups
from tests.weights.packed_files import load_slots, memory_of_all
from tests.weights.packed_formats import FORMATS

NAN = float("nan")
FAMILIES = ("llama", "qwen3", "qwen3-moe", "llama-bias-even", "deepseek-v3", "gpt-oss-even", "lfm2-moe-even")
FAMILIES += ("gemma4-moe-even", "qwen3.5-moe", "phi4-mini", "granite-even")


class Member(Group):
    """One of several tensor parallel ranks, whose others are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def model_of(folder: Path, rank: Rank, **options: Any) -> Any:
    """The part of a checkpoint's model that a rank holds, loaded; and the bytes that a plan counts for it."""
    sizes = {"tensor_parallel_size": rank.tensor_parallel_size, "pipeline_parallel_size": rank.pipeline_parallel_size}
    config = Config(model=str(folder), device="cpu", dtype="float32", cpu_kernels="torch", **sizes, **options)
    spec = describe(folder).config
    runner = ModelRunner.__new__(ModelRunner)
    runner.device = torch.device("cpu")
    runner._parallel = Parallel(rank, Member(rank.tensor_rank, rank.tensor_parallel_size))
    runner._build_model(config, spec, 256)
    slots = runner.model.slots()
    if config.load_format == "dummy":
        load_dummy(slots, 0, dtype=torch.float32, device=runner.device)
    else:
        load_slots(folder, spec, slots)
    runner.model.finish_loading()
    held = memory_of_all([slot.target for slot in slots.values()])  # not epsilons, and norms that are repeated
    assert held == weight_bytes(config, runner.model.shard, itemsize=4)
    return runner.model


def dense(target: Any) -> Tensor:
    return target.dequantized()


def check_ranks(folder: Path, *splits: tuple[int, int], **options: Any) -> None:
    whole = model_of(folder, Rank(), **options)
    expected: dict[str, Tensor] = {}  # by name in checkpoints
    for name, slot in whole.slots().items():
        expected[name] = torch.full(slot.shape, NAN)
        for place, part in slot.places:
            expected[name][part] = dense(slot.target)[place]
    for tensor, pipeline in splits:
        seen = dict.fromkeys(expected, 0)
        for index in range(tensor * pipeline):
            for name, slot in model_of(folder, Rank(index, tensor, pipeline), **options).slots().items():
                held = dense(slot.target)
                for place, part in slot.places:
                    assert torch.equal(held[place], expected[name][part]), name
                    seen[name] += held[place].numel()
        assert all(count >= expected[name].numel() for name, count in seen.items())


@pytest.mark.parametrize("name", FORMATS)
def test_formats(tmp_path: Path, name: str) -> None:
    check_ranks(FORMATS[name](tmp_path).packed, (2, 1), (1, 2))


@pytest.mark.parametrize(("arch", "types"), [("llama", test_gguf_groups.LLAMA), ("qwen3moe", test_gguf_groups.MOE)])
def test_gguf(tmp_path: Path, arch: str, types: dict[str, str]) -> None:
    """Also with units that 256 columns share, which two ranks cut."""
    file = tmp_path / "packed.gguf"
    test_gguf_groups.write(file, arch, types)
    check_ranks(file, (2, 1), (1, 2), quantization="gguf")


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("name", FAMILIES)
def test_made_while_loading(name: str, quantization: str) -> None:
    """Dense and mixtures of experts, tied and untied heads, other layers than attention: all by dummy weights."""
    check_ranks(model_dir(name), (2, 1), quantization=quantization, load_format="dummy")


@pytest.mark.parametrize("name", ["fp8 blocks", "nvfp4", "mxfp4 of gpt-oss", "packed asymmetric", "gptq ordered"])
def test_dummy_weights(tmp_path: Path, name: str) -> None:
    """As packed as the config says; random numbers have no order of columns."""
    check_ranks(FORMATS[name](tmp_path).packed, (2, 1), load_format="dummy")
