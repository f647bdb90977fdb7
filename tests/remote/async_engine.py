"""An `AsyncLLM` with a small model, and the last output of a request."""

from collections.abc import AsyncIterator
from typing import Any

from nanovllm import AsyncLLM, RequestOutput
from tests.helpers import TEXT_MODEL, greedy_params, model_dir

TEXTS = ["Natalia sold 48 clips", "Hello, how many apples", "x", "There were 12 eggs in the basket."]
OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_block_size": 16,
    "num_kv_cache_blocks": 64,
    "cpu_kernels": "torch",  # a request of the native step can end before a test looks at it
}
ENDLESS = greedy_params(200)
PATIENCE = 20.0  # seconds allowed for operations that take milliseconds


async def start(**options: Any) -> AsyncLLM:
    return await AsyncLLM.start(model_dir(TEXT_MODEL), **(OPTIONS | options))


async def last(outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
    async for output in outputs:
        found = output
    return found
