"""Compare the speed with llama.cpp on the same GGUF file in the same process.

Both sides use the same number of threads and run in turn (A B A B ...); each round gives a ratio, and the median of the
ratios is the result, because the speed of a machine varies by more than such differences. Both sample greedily, ignore
end-of-sequence tokens and reuse no prefix.

  stream     a single request, a prompt of 128 tokens, an output of 128
  batch      16 requests at once, prompts of 64 to 256 tokens, outputs of 64 to 128
  first 128  the first token of a prompt of 128 tokens; first 512 likewise

llama.cpp is the server inside the package xllamacpp (`pip install xllamacpp`), called without HTTP.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count
from nanovllm.bench.report import Report, Row, environment, medians_of, peak_memory
from nanovllm.errors import NanoError

if TYPE_CHECKING:
    from nanovllm.bench.workload import Workload
    from nanovllm.llm import LLM

# name: number of requests, prompt lengths, output lengths
CASES = {
    "stream": (1, (128, 128), (128, 128)),
    "batch": (16, (64, 256), (64, 128)),
    "first 128": (1, (128, 128), (1, 1)),
    "first 512": (1, (512, 512), (1, 1)),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=count, default=5, metavar="N", help="Number of runs of each side. Default: %(default)s."
    )
    parser.add_argument(
        "--threads", type=count, metavar="N", help="Number of threads. Default: all cores that this process may use."
    )
    parser.add_argument(
        "--scale",
        type=count,
        default=1,
        metavar="N",
        help="Divide the lengths of all prompts and outputs by N, for a quick run. Default: %(default)s.",
    )


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    if importlib.util.find_spec("xllamacpp") is None:
        raise NanoError("this comparison needs llama.cpp, as the package xllamacpp: pip install xllamacpp")
    import torch

    from nanovllm import LLM
    from nanovllm.utils.hub import resolve_model

    path = resolve_model(engine.get("model"))
    if path.suffix != ".gguf":
        raise NanoError(f"llama.cpp reads GGUF files, and {path} is none; choose one with --model")
    threads = args.threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(threads)
    with LLM(**{"device": "cpu", **engine, "model": str(path), "skip_tokenizer_init": True}) as llm:
        cases = _workloads(llm, args.scale)
        theirs = LlamaCpp(path, threads, list(cases.values()))
        for workload in cases.values():  # warm-up
            _run_nanovllm(llm, workload.first_tokens(2))
            theirs.generate(workload.first_tokens(2))
        rows = [
            {"case": case, "round": str(number), **_compare(llm, theirs, workload)}
            for number in range(1, args.rounds + 1)
            for case, workload in cases.items()
        ]
        facts = environment(llm) | {"model": path.name, "xllamacpp": theirs.version}
    medians = [
        {"case": case, "round": "median", **medians_of([row for row in rows if row["case"] == case])} for case in cases
    ]
    return Report("compare-llamacpp", facts, {"rounds": args.rounds, **peak_memory()}, rows + medians)


def _workloads(llm: "LLM", scale: int) -> dict[str, "Workload"]:
    from nanovllm.bench.workload import make_workload

    cases = {}
    for case, (num_seqs, *lengths) in CASES.items():
        input_len, output_len = ((max(1, low // scale), max(1, high // scale)) for low, high in lengths)
        cases[case] = make_workload(
            num_seqs=num_seqs,
            input_len=input_len,
            output_len=output_len,
            seed=llm.config.seed,
            vocab_size=llm.model_config.vocab_size,
            temperature=0.0,
        )
        cases[case].check_fits(llm.max_model_len)
    return cases


def _compare(llm: "LLM", theirs: "LlamaCpp", workload: "Workload") -> Row:
    ours = _seconds(lambda: _run_nanovllm(llm, workload))
    other = _seconds(lambda: theirs.generate(workload))
    return {"nanovllm_seconds": ours, "llamacpp_seconds": other, "ratio": other / ours}


def _seconds(generate: Callable[[], None]) -> float:
    begin = time.perf_counter()
    generate()
    return time.perf_counter() - begin


def _run_nanovllm(llm: "LLM", workload: "Workload") -> None:
    llm.reset_prefix_cache()
    llm.generate(workload.prompts, workload.params, use_tqdm=False)


class LlamaCpp:
    """llama.cpp with one slot for each request of the largest workload."""

    def __init__(self, path: Path, threads: int, workloads: "list[Workload]") -> None:
        import xllamacpp

        self.version: str = importlib.metadata.version("xllamacpp")
        slots = max(len(workload.prompts) for workload in workloads)
        longest = max(
            len(prompt) + output_len
            for workload in workloads
            for prompt, output_len in zip(workload.prompts, workload.output_lens, strict=True)
        )
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_parallel, params.n_ctx = slots, slots * (longest + 8)
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        params.verbosity = -1  # no log
        self._server = xllamacpp.Server(params)
        self._clients = ThreadPoolExecutor(slots)

    def generate(self, workload: "Workload") -> None:
        lengths = list(self._clients.map(self._complete, workload.prompts, workload.output_lens))
        if lengths != workload.output_lens:
            raise NanoError(f"llama.cpp made outputs of {lengths} tokens instead of {workload.output_lens}")

    def _complete(self, prompt: list[int], output_len: int) -> int:
        """How many tokens were made."""
        request = {"prompt": prompt, "max_tokens": output_len, "temperature": 0.0}
        answer: Any = self._server.handle_completions({**request, "ignore_eos": True, "cache_prompt": False})
        if "usage" not in answer:
            raise NanoError(f"llama.cpp refused a request: {answer}")
        return int(answer["usage"]["completion_tokens"])
