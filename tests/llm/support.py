"""Prompts for the tests of `LLM`, and the output of one prompt."""

from typing import Any

from nanovllm import LLM, RequestOutput, SamplingParams

TEXT = "Natalia sold 48 clips"
OTHERS = ["Hello, how many apples", "x", "There were 12 eggs in the basket."]


def one(llm: LLM, prompt: Any, params: SamplingParams) -> RequestOutput:
    (output,) = llm.generate(prompt, params, use_tqdm=False)
    return output


def encode(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return llm.tokenizer.encode(text)
