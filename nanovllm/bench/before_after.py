"""The speed of two versions of this package on one machine: one before a change, and this one.

Speeds of shared machines drift by more than a change makes of difference, so the versions run in turn, each case in a
process of its own. The measured process uses nothing but `LLM` and `SamplingParams`, so that it runs old versions, too.

    git worktree add ../before COMMIT
    python -m nanovllm.bench.before_after ../before --model-shapes qwen3-0.6b qwen3-8b

  start            seconds to create the engine
  b1, b8, ...      milliseconds per token at these batch sizes: the difference of two runs, one of which decodes
  prefill          seconds for the prompts of the largest batch
  tokens/second    output tokens of requests with lengths like those of `bench throughput`, prompts included

Of several repetitions the fastest counts. The last row of a model has the ratios, after to before.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

Case = dict[str, Any]
Figures = dict[str, float]


def main(arguments: Sequence[str] | None = None) -> None:
    from nanovllm.bench.report import table
    from nanovllm.bench.shapes import shape_folder

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="folder that contains the other version's package nanovllm")
    parser.add_argument("--model-shapes", nargs="+", default=[], metavar="NAME", help="shapes with random weights")
    parser.add_argument("--models", nargs="+", default=[], type=Path, metavar="FOLDER", help="models with weights")
    parser.add_argument("--batch-sizes", nargs="*", type=int, default=[1, 8, 64, 256], metavar="N")
    parser.add_argument("--input-len", type=int, default=960, metavar="N")
    parser.add_argument("--output-len", type=int, default=97, metavar="N")
    parser.add_argument("--num-seqs", type=int, default=256, metavar="N", help="requests of the throughput; 0: none")
    parser.add_argument("--max-len", type=int, default=1024, metavar="N", help="their longest prompt and output")
    parser.add_argument("--vocab-size", type=int, default=10_000, metavar="N", help="prompts have tokens below this")
    parser.add_argument("--repeat", type=int, default=2, metavar="N")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="further options of LLM")
    options = parser.parse_args(arguments)
    versions = {"before": options.before.resolve(), "after": Path(__file__).parents[2]}
    if not (versions["before"] / "nanovllm").is_dir():
        parser.error(f"{options.before}: has no folder nanovllm")
    random_weights = {"load_format": "dummy", "skip_tokenizer_init": True}
    models = [(name, {"model": str(shape_folder(name)), **random_weights}) for name in options.model_shapes]
    models += [(path.name, {"model": str(path.resolve()), "skip_tokenizer_init": True}) for path in options.models]
    sizes = ("batch_sizes", "input_len", "output_len", "num_seqs", "max_len", "vocab_size", "repeat")
    rows = []
    for name, engine in models:
        case = {size: getattr(options, size) for size in sizes} | {"engine": engine | options.engine}
        found = {version: run_version(path, case) for version, path in versions.items()}
        found["ratio"] = {figure: found["after"][figure] / found["before"][figure] for figure in found["after"]}
        rows += [{"model": name, "version": version, **figures} for version, figures in found.items()]
    print(table(rows))


def run_version(path: Path, case: Case) -> Figures:
    """Measure with the package in `path`, in a process that does not see the other one."""
    command = [sys.executable, "-P", __file__, json.dumps(case)]  # -P: modules beside this file are not found first
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(path)}, cwd=path, stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{path}: the measured process ended with exit status {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


# --- in the measured process ------------------------------------------------------------------------------------------


def measure(case: Case) -> Figures:
    from nanovllm import LLM, SamplingParams

    rng = Random(0)
    begin = time.perf_counter()
    llm = LLM(**{"enable_prefix_caching": False, **case["engine"]})
    figures = {"start": time.perf_counter() - begin}

    def seconds(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        prompts = [[rng.randint(0, case["vocab_size"] - 1) for _ in range(length)] for length in prompt_lens]
        params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=length) for length in output_lens]
        begin = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin

    def best(prompt_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        return min(seconds(prompt_lens, output_lens) for _ in range(case["repeat"]))

    for batch in case["batch_sizes"]:
        prompt_lens = [case["input_len"]] * batch
        seconds(prompt_lens, [4] * batch)  # compiles and records what a batch of this size needs
        figures["prefill"] = best(prompt_lens, [1] * batch)
        whole = best(prompt_lens, [case["output_len"]] * batch)
        figures[f"b{batch}"] = (whole - figures["prefill"]) / (case["output_len"] - 1) * 1e3
    if case["num_seqs"]:
        lengths = Random(0)
        shortest = min(100, case["max_len"])
        drawn = [
            (lengths.randint(shortest, case["max_len"]), lengths.randint(shortest, case["max_len"]))
            for _ in range(case["num_seqs"])
        ]
        prompt_lens, output_lens = [pair[0] for pair in drawn], [pair[1] for pair in drawn]
        seconds(prompt_lens, [1 + number // 4 for number in range(len(drawn))])  # every batch size once
        figures["tokens_per_second"] = sum(output_lens) / best(prompt_lens, output_lens)
    llm.close()
    return figures


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        print(json.dumps(measure(json.loads(sys.argv[1]))))
    else:
        main()
