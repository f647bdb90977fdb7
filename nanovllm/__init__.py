"""nanovllm: a small, fast LLM inference engine.

    from nanovllm import LLM, SamplingParams
    print(LLM().generate("The capital of France is", SamplingParams(temperature=0))[0]["text"])

Importing the package does not import torch; creating an `LLM` does. `AsyncLLM` is the same for asyncio, with the engine
in a separate process.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nanovllm.errors import NanoError
    from nanovllm.llm import LLM
    from nanovllm.outputs import BeamSearchOutput, CompletionOutput, Logprob, RequestOutput
    from nanovllm.remote.async_llm import AsyncLLM
    from nanovllm.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputs

_MODULES = {  # public name: the module that defines it, imported on first use
    "LLM": "nanovllm.llm",
    "AsyncLLM": "nanovllm.remote.async_llm",
    "SamplingParams": "nanovllm.sampling_params",
    "BeamSearchParams": "nanovllm.sampling_params",
    "StructuredOutputs": "nanovllm.sampling_params",
    "RequestOutput": "nanovllm.outputs",
    "CompletionOutput": "nanovllm.outputs",
    "BeamSearchOutput": "nanovllm.outputs",
    "Logprob": "nanovllm.outputs",
    "NanoError": "nanovllm.errors",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "Logprob",
    "NanoError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)
