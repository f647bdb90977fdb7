"""How many tokens a second come out when many requests are there at once.

An engine's throughput is decided by how it fills a batch. A decode step reads all weights once, whether for one
sequence or for a hundred, so tokens are cheap as long as the batch stays full: requests must join as soon as others
end, long prompts must not stall the rest, and the KV cache must hold them all. What is then left is reading the KV
cache itself, which no batch shares.

By default this is the published workload (256 requests, 142,827 tokens in and 133,966 out). It takes seconds on a GPU
and long on a CPU; --num-seqs, --input-len, --output-len and --max-tokens shrink it. --model-shape measures a model
whose weights are not at hand. Before the clock starts a short request has run, and on a GPU also the same prompts with
short answers, so that every batch size has been seen. --repeat runs the workload again in the same engine, with an
emptied prefix cache: best and median follow (of an even number, the slower of the two in the middle).

  output tokens/second   what the published numbers state: generated tokens over the whole time, prompts included
  fraction of roofline   the least time for this work over the time it took. The least time follows from how fast this
                         device copies memory and multiplies matrices, both measured here after the run, and from what
                         must be read: the weights once a step, each sequence's keys and values up to its position
  steps, decode steps    all steps, and those without a prompt in them
  mean batch             generated tokens over steps: how full the batch was
  startup                seconds from opening the model to the first answer, and of its phases; not part of the rest
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

LONG_ON_A_CPU = 20_000  # tokens, in and out
REFRESH_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-seqs", type=count, default=256, metavar="N", help="requests; default: %(default)s")
    lengths: dict[str, Any] = {"type": span, "default": (100, 1024), "metavar": "A:B"}
    parser.add_argument("--input-len", help="tokens of a prompt, drawn from A to B; default: 100:1024", **lengths)
    parser.add_argument("--output-len", help="tokens of an answer, drawn from A to B; default: 100:1024", **lengths)
    parser.add_argument("--max-tokens", type=count, metavar="N", help="cut every answer after N tokens")
    parser.add_argument("--repeat", type=count, default=1, metavar="N", help="runs in the same engine; default: 1")


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
    num_decode_steps: int  # without a prompt in them


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
    """One short request, so that what happens only once is not measured; it leaves nothing in the prefix cache."""
    from nanovllm import SamplingParams

    llm.generate([[0, 1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.reset_prefix_cache()


@collector_calmed()
def serve(llm: "LLM", workload: "Workload") -> Run:
    """Hand over all requests, step until all are done; as `generate` does."""
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
            if plan is not None:  # else the first step is still under way
                num_steps += 1
                num_decode_steps += not plan.chunks
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
            f"{num_tokens:,} tokens take long on a CPU; a smaller workload: "
            "--num-seqs 16 --input-len 64:256 --output-len 64:128",
            file=sys.stderr,
        )
