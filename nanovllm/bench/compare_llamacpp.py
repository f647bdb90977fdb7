"""Compare the speed with llama.cpp on the same GGUF file.

Both sides use the same number of threads and run in turn (A B A B ...); each round gives a ratio, and the median of the
ratios is the result, because the speed of a machine varies by more than such differences. Both sample greedily, ignore
end-of-sequence tokens and reuse no prefix.

  stream     a single request, a prompt of 128 tokens, an output of 128
  batch      16 requests at once, prompts of 64 to 256 tokens, outputs of 64 to 128
  first 128  the first token of a prompt of 128 tokens; first 512 likewise

llama.cpp is npm's node-llama-cpp if it is installed, else PyPI's xllamacpp (bench/llamacpp.py).
"""

import argparse
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count
from nanovllm.bench.llamacpp import NODE, PYTHON, Peer, open_peer, run_peer
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
        "--peer", choices=(NODE, PYTHON), help=f"Which llama.cpp. Default: {NODE} if it is installed, else {PYTHON}."
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
        theirs = open_peer(args.peer, path, threads, list(cases.values()))
        for workload in cases.values():  # warm-up
            _run_nanovllm(llm, workload.first_tokens(2))
            run_peer(theirs, workload.first_tokens(2))
        rows = [
            {"case": case, "round": str(number), **_compare(llm, theirs, workload)}
            for number in range(1, args.rounds + 1)
            for case, workload in cases.items()
        ]
        theirs.close()
        facts = environment(llm) | {"model": path.name, theirs.name: theirs.version}
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


def _compare(llm: "LLM", theirs: Peer, workload: "Workload") -> Row:
    ours = _seconds(lambda: _run_nanovllm(llm, workload))
    other = _seconds(lambda: run_peer(theirs, workload))
    return {"nanovllm_seconds": ours, "llamacpp_seconds": other, "ratio": other / ours}


def _seconds(generate: Callable[[], None]) -> float:
    begin = time.perf_counter()
    generate()
    return time.perf_counter() - begin


def _run_nanovllm(llm: "LLM", workload: "Workload") -> None:
    llm.reset_prefix_cache()
    llm.generate(workload.prompts, workload.params, use_tqdm=False)
