"""nanovllm: a small, fast LLM inference engine.

    from nanovllm import LLM, SamplingParams
    print(LLM().generate("The capital of France is", SamplingParams(temperature=0))[0]["text"])

Importing the package does not import torch; creating an `LLM` does. `AsyncLLM` is the same for asyncio, with the engine
in a separate process.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nanovllm.engine.beam_search import BeamSearchOutput, BeamSearchParams
    from nanovllm.errors import NanoError
    from nanovllm.llm import LLM
    from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput
    from nanovllm.remote.async_llm import AsyncLLM
    from nanovllm.sampling_params import SamplingParams, StructuredOutputs

_MODULES = {  # public name: the module that defines it, imported on first use
    "LLM": "llm",
    "AsyncLLM": "remote.async_llm",
    "SamplingParams": "sampling_params",
    "BeamSearchParams": "engine.beam_search",
    "StructuredOutputs": "sampling_params",
    "RequestOutput": "outputs",
    "CompletionOutput": "outputs",
    "BeamSearchOutput": "engine.beam_search",
    "Logprob": "outputs",
    "NanoError": "errors",
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

    return getattr(import_module(f"nanovllm.{_MODULES[name]}"), name)
