"""The weights that `nanovllm plan` counts, compared with those that the native step holds."""

from pathlib import Path

from nanovllm import LLM
from nanovllm.engine.memory_plan import make_plan

OPTIONS = ("device", "cpu_kernels", "dtype", "quantization", "max_model_len", "num_kv_cache_blocks")


def check_planned_bytes(llm: LLM, path: Path) -> None:
    """`path`: of the model that `llm` runs."""
    weights = llm.llm_engine._core.executor.model._weights.values()
    tensors = [tensor for weight in weights for tensor in (weight.data, weight.scales, weight.minima)]
    held = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    assert make_plan(str(path), {name: getattr(llm.config, name) for name in OPTIONS}).weight_bytes == held
