"""Files of every packed format, damaged one tensor at a time: refused by name, or they stand for the same weight."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM
from nanovllm.checkpoint.stored import Slot
from nanovllm.errors import CheckpointError
from nanovllm.models.spec import ModelSpec
from tests.checkpoint import gguf_files
from tests.helpers import model_dir, open_llm
from tests.weights import test_gguf_groups, test_gpt_oss
from tests.weights.packed_files import load_slots
from tests.weights.packed_formats import FORMATS

LAYER = "model.layers.1.mlp."
EXPERTS = f"{LAYER}experts"
MODULES = (
    f"{EXPERTS}.2.up_proj",
    EXPERTS,
    f"{LAYER}up_proj",
)  # the first that a file has is damaged; up has gate beside


@dataclass(frozen=True)
class Loaded:
    """The feed-forward part of a layer, whose weights can be loaded again from other files."""

    spec: ModelSpec
    slots: dict[str, Slot]
    tensors: dict[str, Tensor]  # of the undamaged file

    def load(self, tensors: dict[str, Tensor], folder: Path) -> None:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        load_slots(folder, self.spec, self.slots)

    def weights(self) -> list[Tensor]:
        """What all loaded weights stand for."""
        targets: dict[int, Any] = {id(slot.target): slot.target for slot in self.slots.values()}
        return [target.dequantized().clone() for target in targets.values()]


@pytest.fixture(scope="module", params=FORMATS)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    files = FORMATS[request.param](tmp_path_factory.mktemp("damaged"))
    tensors: dict[str, Tensor] = {}
    for file in files.packed.glob("*.safetensors"):
        tensors |= load_file(file)
    with open_llm(files.packed, cpu_kernels="torch") as llm:
        model = llm.llm_engine._core.executor.model
        slots = {name: slot for name, slot in model.slots().items() if name.startswith(LAYER)}
        yield Loaded(model.spec, slots, {name: one for name, one in tensors.items() if name.startswith(LAYER)})


TYPES = (torch.float64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool)
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "a row less": lambda t: t[:-1],
    "a row more": lambda t: torch.cat([t, t[:1]]),
    "a column less": lambda t: t[..., :-1],
    "a column more": lambda t: torch.cat([t, t[..., :1]], dim=-1),
    "twice": lambda t: torch.cat([t, t]),
    "transposed": lambda t: t.t() if t.dim() == 2 else t.flip(0).unsqueeze(0),
    "one dimension": lambda t: t.flatten(),
    "one dimension more": lambda t: t.unsqueeze(0),
    "a column": lambda t: t.reshape(-1, 1),
    "one number": lambda t: t.flatten()[0],
    "nothing": lambda t: t.flatten()[:0],
    "no rows": lambda t: t[:0],
}
NOT_OF_A_NUMBER = {"a row less", "a row more", "a column less", "a column more", "twice", "no rows", "one number"}
VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "NaN": lambda t: torch.full_like(t, float("nan")),
    "one NaN": lambda t: first_set(t, float("nan")),
    "infinite": lambda t: first_set(t, float("inf")),
    "zero": lambda t: torch.zeros_like(t),
    "one zero": lambda t: first_set(t, 0.0),
}


def first_set(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone()
    changed.view(-1)[0] = value
    return changed


def damages(own: str, tensor: Tensor) -> Iterator[tuple[str, Tensor | None]]:
    """What may happen to a tensor and can be seen; None: it is missing."""
    yield "missing", None
    unseen = set() if tensor.is_floating_point() else set(VALUES)
    if tensor.dtype == torch.float8_e4m3fn:  # has no infinity
        unseen |= {"infinite", "one zero"} | ({"zero"} if own == "weight" else set())
    if own == "weight.absmax" or own == "weight.nested_absmax":
        unseen |= {"one zero"}
    if own == "weight_scale" and tensor.dim() == 2 and tensor.shape[1] == 1:  # one for all instead of one per row
        unseen |= {"one number"}
    for name, change in (SHAPES | VALUES).items():
        if name not in unseen and (tensor.dim() or name not in NOT_OF_A_NUMBER):
            yield name, change(tensor)
    yield from ((str(dtype), tensor.to(dtype)) for dtype in TYPES if dtype != tensor.dtype)


@torch.inference_mode()
def test_damage_is_refused_or_changes_nothing(loaded: Loaded, tmp_path: Path) -> None:
    loaded.load(loaded.tensors, tmp_path)
    expected = loaded.weights()
    module = next(one for one in MODULES if any(name.startswith(f"{one}.") for name in loaded.tensors))
    names = [name for name in loaded.tensors if name.startswith(f"{module}.") and not name.endswith("bias")]
    assert len(names) > 1
    wrong = []
    for name in names:
        for damage, tensor in damages(name.removeprefix(f"{module}."), loaded.tensors[name]):
            changed = {other: one for other, one in loaded.tensors.items() if other != name}
            try:
                loaded.load(changed if tensor is None else changed | {name: tensor}, tmp_path)
                if not all(map(torch.equal, expected, loaded.weights())):
                    wrong.append(f"{name}: {damage}: is read as another weight")
            except CheckpointError as error:
                if module not in str(error):
                    wrong.append(f"{name}: {damage}: {error} does not name it")
            except Exception as error:  # all of them are listed
                wrong.append(f"{name}: {damage}: {error!r}")
    assert not wrong, "\n".join(wrong)


def test_biases_of_experts(tmp_path: Path) -> None:
    """Whose shapes the config does not ask for; those of gate and up are in one tensor, in turn."""
    files = test_gpt_oss.write(tmp_path)
    tensors = load_file(files.packed / "model.safetensors")
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        full = f"{EXPERTS}.{name}"
        for change in SHAPES.values():
            damaged = tensors | {full: change(tensors[full]).contiguous()}
            save_file(damaged, files.packed / "model.safetensors")
            with pytest.raises(CheckpointError, match=rf"{EXPERTS}\..*_proj"):
                open_llm(files.packed)


@pytest.mark.parametrize("own", ["mlp.up_proj.weight", "input_layernorm.weight"])
def test_integers_without_scales(tmp_path: Path, own: str) -> None:
    """Of a checkpoint whose config does not say that it is quantized."""
    name = f"model.layers.1.{own}"
    (tmp_path / "config.json").write_text((model_dir("qwen3") / "config.json").read_text())
    tensors = load_file(model_dir("qwen3") / "model.safetensors")
    save_file(tensors | {name: tensors[name].to(torch.int8)}, tmp_path / "model.safetensors")
    for quantization in (None, "int8"):
        with pytest.raises(CheckpointError, match=rf"{name} holds integers \(I8\)"):
            open_llm(tmp_path, quantization=quantization)


@pytest.mark.parametrize("kept", [0, 7, 8, 100, -1])
def test_files_that_are_cut(tmp_path: Path, kept: int) -> None:
    files = FORMATS["packed asymmetric"](tmp_path)
    file = files.packed / "model-1.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors: damaged or incomplete"):
        open_llm(files.packed)


GGUF_SHAPES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "a row less": lambda t: t[..., :-1, :] if t.ndim > 1 else t[:-1],
    "twice": lambda t: np.concatenate([t, t]),
    "half a row": lambda t: t[..., : t.shape[-1] // 2],
    "one dimension": lambda t: t.reshape(-1),
    "one dimension more": lambda t: t[None],
}


@pytest.mark.parametrize("arch", ["llama", "qwen3moe"])
def test_tensors_of_gguf_files(tmp_path: Path, arch: str) -> None:
    """Rows of another length, another number of experts, and so on, in a file whose matrices stay packed."""
    tensors = gguf_files.model_tensors(arch)
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith("blk.1.")}
    for name, tensor in layer.items():
        # as the error names it: the part of the name that both kinds of files have
        own = {"attn_output": "o_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        kind = name.split(".")[2]
        theirs = own.get(
            kind, kind.removeprefix("attn_").removeprefix("ffn_").removesuffix("_inp").removesuffix("_exps")
        )
        for damage in (None, *GGUF_SHAPES.values()):
            changed = {other: one for other, one in tensors.items() if other != name}
            if damage is not None:
                changed[name] = np.ascontiguousarray(damage(tensor))
                if np.array_equal(changed[name].shape, tensor.shape):
                    continue
            writer = gguf_files.model_writer(tmp_path / "m.gguf", arch)
            for other, one in changed.items():
                packs = one.ndim > 1 and one.shape[-1] % 32 == 0
                type_of = GGMLQuantizationType.Q8_0 if packs else GGMLQuantizationType.F32
                writer.add_tensor(other, gguf.quants.quantize(one, type_of), raw_dtype=type_of)
            gguf_files.finish(writer)
            with pytest.raises(CheckpointError, match=rf"layers\.1\..*{theirs}"):
                LLM(tmp_path / "m.gguf", quantization="gguf", **test_gguf_groups.OPTIONS)
