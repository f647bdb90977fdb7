"""Output tokens per second for many requests that arrive at once.

The throughput of an engine depends on how full its batches are. A decode step reads all weights once, for one sequence
or for a hundred, so tokens are cheap while the batch is full: new requests must start as soon as others end, long
prompts must not delay the rest, and the KV cache must hold all sequences. The remaining cost is reading the KV cache,
which grows with the batch.

The default is the published workload (256 requests, 142,827 prompt tokens, 133,966 output tokens). It takes seconds on
a GPU and long on a CPU; --num-seqs, --input-len, --output-len and --max-tokens make it smaller. --model-shape measures
a model without its checkpoint. A short request runs before the measurement, and on a GPU also the same prompts with
short outputs, so that every batch size has run once. --repeat runs the workload several times in the same engine, with
an empty prefix cache, and reports best and median (for an even number, the slower of the two in the middle).

  output tokens/second   generated tokens divided by the whole time, prompts included, as in the published numbers
  fraction of roofline   the minimum time for this work, divided by the measured time. The minimum follows from the
                         device's copy bandwidth and matrix rate, both measured after the run, and from what must be
                         read: the weights once per step, and the KV cache of each sequence up to its position
  steps, decode steps    number of all steps, and of those that compute no prompt
  mean batch             generated tokens divided by steps
  startup                seconds from loading the model to the first answer, and of each phase; not included above
"""

import argparse
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count, span
from nanovllm.bench.report import Report, Row, environment, peak_memory
from nanovllm.utils.collector import collector_calmed

if TYPE_CHECKING:
    from nanovllm.bench.workload import Workload
    from nanovllm.llm import LLM

LONG_ON_A_CPU = 20_000  # prompt and output tokens
REFRESH_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--num-seqs", type=count, default=256, metavar="N", help="Number of requests. Default: %(default)s."
    )
    lengths: dict[str, Any] = {"type": span, "default": (100, 1024), "metavar": "A:B"}
    parser.add_argument("--input-len", help="Prompt lengths, drawn from A to B tokens. Default: 100:1024.", **lengths)
    parser.add_argument("--output-len", help="Output lengths, drawn from A to B tokens. Default: 100:1024.", **lengths)
    parser.add_argument(
        "--max-tokens", type=count, metavar="N", help="Maximum output length in tokens; cuts the drawn lengths."
    )
    parser.add_argument(
        "--repeat", type=count, default=1, metavar="N", help="Number of runs in the same engine. Default: 1."
    )


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    from nanovllm import LLM
    from nanovllm.bench.roofline import roofline_of
    from nanovllm.bench.workload import make_workload

    begin = time.perf_counter()
    with LLM(**engine) as llm:
        opened = time.perf_counter()
        warm_up(llm)
        started = time.perf_counter()
        workload = make_workload(
            num_seqs=args.num_seqs,
            input_len=args.input_len,
            output_len=args.output_len,
            max_tokens=args.max_tokens,
            seed=llm.config.seed,
            vocab_size=llm.model_config.vocab_size,
        )
        workload.check_fits(llm.max_model_len)
        facts = environment(llm)
        _warn_if_long(workload)
        if runs_on_gpu(engine):
            serve(llm, workload.staggered())
        runs = []
        for _ in range(args.repeat):
            llm.reset_prefix_cache()
            runs.append(serve(llm, workload))
        memory = peak_memory()
    roofline = roofline_of(llm)
    least_seconds = roofline.workload_seconds(workload.input_lens, workload.output_lens)
    settings = {
        "requests": args.num_seqs,
        "seed": llm.config.seed,
        "input_tokens": workload.num_input_tokens,
        "output_tokens": workload.num_output_tokens,
        "startup_seconds": started - begin,
        "startup_phases": {**getattr(llm, "startup_seconds", {}), "first_request": started - opened},
        **memory,
        **roofline.machine.row(),
        "least_seconds": least_seconds,
    }
    return Report("throughput", facts, settings, _rows(runs, workload, least_seconds))


@dataclass(frozen=True)
class Run:
    seconds: float
    num_steps: int
    num_decode_steps: int  # steps that compute no prompt


def _rows(runs: list[Run], workload: "Workload", least_seconds: float) -> list[Row]:
    rows: list[Row] = [
        {
            "run": str(number),
            "seconds": run.seconds,
            "output_tokens_per_second": workload.num_output_tokens / run.seconds,
            "total_tokens_per_second": (workload.num_input_tokens + workload.num_output_tokens) / run.seconds,
            "fraction_of_roofline": least_seconds / run.seconds,
            "steps": run.num_steps,
            "decode_steps": run.num_decode_steps,
            "mean_batch": workload.num_output_tokens / run.num_steps,
        }
        for number, run in enumerate(runs, 1)
    ]
    if len(rows) == 1:
        return rows
    ranked = sorted(rows, key=lambda row: row["seconds"])
    return [*rows, {**ranked[0], "run": "best"}, {**ranked[len(ranked) // 2], "run": "median"}]


def runs_on_gpu(engine: dict[str, Any]) -> bool:
    from nanovllm.runner.device import resolve_device

    return resolve_device(engine.get("device", "auto")).type == "cuda"


def warm_up(llm: "LLM") -> None:
    """Run one short request, so that one-time work is not measured, and empty the prefix cache."""
    from nanovllm import SamplingParams

    llm.generate([[0, 1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.reset_prefix_cache()


@collector_calmed()
def serve(llm: "LLM", workload: "Workload") -> Run:
    """Add all requests and run steps until all are finished, as `generate` does."""
    from tqdm import tqdm

    params = workload.params
    num_steps = num_decode_steps = 0
    # tqdm reads disable=None as "only on a terminal".
    with tqdm(total=workload.num_output_tokens, unit="tok", desc="Generating", disable=None) as bar:
        begin = shown = time.perf_counter()
        llm.add_requests(workload.prompts, params)
        while not llm.is_finished():
            done = llm.step()
            plan = llm.llm_engine.last_plan
            if plan is not None:  # None while the first step is still running
                num_steps += 1
                num_decode_steps += not plan.row_steps
            if done:
                bar.update(sum(len(output["token_ids"]) for output in done))
            if time.perf_counter() - shown > REFRESH_SECONDS:
                shown = time.perf_counter()
                bar.set_postfix_str(f"step {num_steps}, {llm.num_unfinished_requests} requests left")
        return Run(time.perf_counter() - begin, num_steps, num_decode_steps)


def _warn_if_long(workload: "Workload") -> None:
    import torch

    num_tokens = workload.num_input_tokens + workload.num_output_tokens
    if not torch.cuda.is_available() and num_tokens > LONG_ON_A_CPU:
        print(
            f"{num_tokens:,} tokens take long on a CPU; for a smaller workload use "
            "--num-seqs 16 --input-len 64:256 --output-len 64:128",
            file=sys.stderr,
        )
