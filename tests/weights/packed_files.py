"""Quantized checkpoints of the tests' tiny models, each with the dense checkpoint of the same, dequantized, weights."""

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM
from nanovllm.checkpoint.loader import load_checkpoint
from nanovllm.checkpoint.stored import Slot
from nanovllm.models.parameters import tensor_names
from nanovllm.models.spec import ModelSpec
from tests.helpers import edit_config, greedy_params, model_dir, open_llm, prompt_of, set_limit

PROMPTS = [prompt_of(length, seed=4) for length in (5, 33, 21)]
MAX_TOKENS = 12
LOGIT_ERROR = 2e-4  # between two ways to add up float32 products

# From a module's name and weight to what the file holds for it, by the end of the names, and the dequantized weight.
Pack = Callable[[str, Tensor], tuple[dict[str, Tensor], Tensor] | None]


@dataclass(frozen=True)
class PackedFiles:
    packed: Path
    dense: Path


def load_slots(folder: Path, spec: ModelSpec, slots: dict[str, Slot]) -> None:
    """Load a folder's files as an engine does, in float32."""
    load_checkpoint(
        folder,
        "auto",
        slots,
        dtype=torch.float32,
        packing=spec.packing,
        names=spec.file_names,
        is_elsewhere=tensor_names(spec).__contains__,
        shows_progress=False,
    )


def is_linear(name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the weight of a linear or an expert in a layer, the router not counted."""
    return ".layers." in name and tensor.dim() == 2 and not name.endswith("mlp.gate.weight")


def write_packed(name: str | Path, folder: Path, pack: Pack, config: dict[str, Any]) -> PackedFiles:
    """Pack the linears of a family's model, or of the one in a folder; `pack` may give None for one that stays dense.

    The tensors are divided over two files, so that a weight and its scale lie apart.
    """
    source = model_dir(name) if isinstance(name, str) else name
    files = PackedFiles(folder / "packed", folder / "dense")
    tensors: dict[str, Tensor] = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    stored, dense = {}, dict(tensors)
    for full, tensor in tensors.items():
        module = full.removesuffix(".weight")
        packed = pack(module, tensor) if is_linear(full, tensor) or module == "lm_head" else None
        if packed is None:
            stored[full] = tensor
        else:
            stored |= {f"{module}.{own}": part.contiguous() for own, part in packed[0].items()}
            dense[full] = packed[1].contiguous()
    for target, held in ((files.packed, stored), (files.dense, dense)):
        target.mkdir(parents=True)
        shutil.copy(source / "config.json", target)
        names = sorted(held, key=lambda full: full.rpartition(".")[2])
        halves = {f"model-{i}.safetensors": names[i::2] for i in range(2)}
        for file, own in halves.items():
            save_file({full: held[full] for full in own}, target / file, metadata={"format": "pt"})
        index = {"metadata": {}, "weight_map": {full: file for file, own in halves.items() for full in own}}
        (target / "model.safetensors.index.json").write_text(json.dumps(index))
    edit_config(files.packed, lambda raw: raw.update(quantization_config=config))
    return files


@functools.cache
def dense_model(folder: Path) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    set_limit(model)
    return model


def generate(folder: Path, **options: Any) -> list[list[int]]:
    with open_llm(folder, **options) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
    return [output["token_ids"] for output in outputs]


def check_greedy(files: PackedFiles, *, most: float = LOGIT_ERROR, **options: Any) -> None:
    """Each token of the packed model is the most likely one of the dense model, up to `most`."""
    for prompt, token_ids in zip(PROMPTS, generate(files.packed, **options), strict=True):
        with torch.inference_mode():
            logits = dense_model(files.dense)(torch.tensor([[*prompt, *token_ids[:-1]]]), use_cache=False).logits[0]
        chosen = logits[len(prompt) - 1 :].gather(1, torch.tensor(token_ids)[:, None])[:, 0]
        best = logits[len(prompt) - 1 :].max(dim=-1).values
        assert (best - chosen).max() < most


def memory_of(llm: LLM) -> int:
    """Bytes of every tensor that the model's layers hold."""
    model = llm.llm_engine._core.executor.model
    return memory_of_all([model.embed_tokens, model.layers, model.norm, model.lm_head])


def memory_of_all(things: list[Any]) -> int:
    """Bytes of every tensor in these layers or weights."""
    seen: dict[int, int] = {}
    visited: set[int] = set()

    def visit(thing: Any) -> None:
        if id(thing) in visited:
            return
        visited.add(id(thing))
        if isinstance(thing, Tensor):
            storage = thing.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, list | tuple):
            for one in thing:
                visit(one)
        elif isinstance(thing, dict):
            for one in thing.values():
                visit(one)
        elif type(thing).__module__.startswith(("nanovllm.layers", "nanovllm.weights", "nanovllm.models.decoder")):
            visit(getattr(thing, "__dict__", {}))

    visit(things)
    return sum(seen.values())


def check_plan(files: PackedFiles, **options: Any) -> None:
    """A plan's bytes are as far below those of the dense model as the bytes in memory."""
    sizes = {"device": "cpu", "dtype": "float32", "num_kv_cache_blocks": 4, "cpu_kernels": "torch"}
    planned, held = [], []
    for folder in (files.dense, files.packed):
        planned.append(LLM.plan(str(folder), **sizes).weight_bytes)
        with open_llm(folder, cpu_kernels="torch", **options) as llm:
            held.append(memory_of(llm))
    assert 0 < planned[0] - planned[1] == held[0] - held[1]
