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

_MODULES = {  # by the module that defines them: public names, imported on first use
    "engine.beam_search": ("BeamSearchOutput", "BeamSearchParams"),
    "errors": ("NanoError",),
    "llm": ("LLM",),
    "outputs": ("CompletionOutput", "Logprob", "RequestOutput"),
    "remote.async_llm": ("AsyncLLM",),
    "sampling_params": ("SamplingParams", "StructuredOutputs"),
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
    from importlib import import_module

    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"nanovllm.{module}"), name)
    raise AttributeError(f"module 'nanovllm' has no attribute {name!r}")
