"""Where the time of a native step goes, on a CPU: see bench/profile.py."""

import argparse
import time
from typing import TYPE_CHECKING, Any, cast

from nanovllm.bench.decoding import decoding
from nanovllm.bench.report import Report, Row, environment
from nanovllm.errors import ConfigError
from nanovllm.runner.native_model import NativeModel

if TYPE_CHECKING:
    from nanovllm.llm import LLM


def profile_native(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    from nanovllm import LLM

    if args.svg is not None:
        raise ConfigError("--svg draws the kernels of a GPU")
    input_len = args.input_len or 128
    with LLM(**{"skip_tokenizer_init": True, **engine, "cpu_kernels": "native"}) as llm:
        facts = environment(llm)
        rows = [_profile(llm, size, input_len, args.steps) for size in args.batch_sizes or [1, 16]]
    return Report("profile", facts, {"input_len": input_len, "steps": args.steps}, rows)


def _profile(llm: "LLM", batch_size: int, input_len: int, num_steps: int) -> Row:
    """Milliseconds of a step, and the percentage that each part has; "other" is Python, sampling and waiting."""
    model = cast(Any, llm.llm_engine._core.executor).model
    assert isinstance(model, NativeModel)
    with decoding(llm, batch_size, input_len, num_steps):
        model.seconds()
        begin = time.perf_counter()
        for _ in range(num_steps):
            llm.step()
        total = time.perf_counter() - begin
        parts = model.seconds()
    parts["other"] = total - sum(parts.values())
    percent = {f"{name}_percent": 100 * seconds / total for name, seconds in parts.items() if seconds}
    return {"batch_size": batch_size, "step_ms": 1e3 * total / num_steps, **percent}
