"""The weights that `nanovllm plan` counts, compared with those that the native step holds."""

from pathlib import Path
from typing import Any

from nanovllm import LLM
from nanovllm.engine.memory_plan import make_plan
from nanovllm.native.formats import ProductWeight
from nanovllm.native.weights import NativeWeight
from nanovllm.runner.native_model import NativeModel

OPTIONS = ("device", "cpu_kernels", "dtype", "quantization", "max_model_len", "num_kv_cache_blocks")


def bytes_of(weight: NativeWeight) -> int:
    tensors = (weight.data, weight.scales, weight.minima, weight.units)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def bytes_of_target(target: Any) -> int:
    """Of a weight that a layer of torch holds, or that the native library multiplies for it."""
    if isinstance(target, ProductWeight):
        return sum(bytes_of(part) for parts in target.parts.values() for part in parts.values())
    return target.tensor.nbytes  # type: ignore[no-any-return]


def check_planned_bytes(llm: LLM, path: Path) -> None:
    """`path`: of the model that `llm` runs."""
    model = llm.llm_engine._core.executor.model
    if isinstance(model, NativeModel):
        held = sum(map(bytes_of, model._weights.values()))
    else:
        held = sum({id(slot.target): bytes_of_target(slot.target) for slot in model.slots().values()}.values())
    assert make_plan(str(path), {name: getattr(llm.config, name) for name in OPTIONS}).weight_bytes == held
