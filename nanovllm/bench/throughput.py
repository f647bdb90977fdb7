"""How many tokens a second come out when many requests are there at once.

An engine's throughput is decided by how it fills a batch. A decode step reads all weights once, whether for one
sequence or for a hundred, so tokens are cheap as long as the batch stays full: requests must join as soon as others
end, long prompts must not stall the rest, and the KV cache must hold them all. What is then left is reading the KV
cache itself, which no batch shares.

By default this is the published workload (256 requests, 142,827 tokens in and 133,966 out). It takes seconds on a GPU
and long on a CPU; --num-seqs, --input-len, --output-len and --max-tokens shrink it.

  output tokens/second   what the published numbers state: generated tokens over the whole time, prompts included
  mean batch             generated tokens over steps: how full the batch was
  startup seconds        from opening the model to the first step; not part of the throughput
"""

import argparse
import sys
import time
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count, span
from nanovllm.bench.report import Report, environment, peak_memory

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


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    from nanovllm import LLM
    from nanovllm.bench.workload import make_workload

    begin = time.perf_counter()
    with LLM(**engine) as llm:
        warm_up(llm)
        startup_seconds = time.perf_counter() - begin
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
        seconds, num_steps = serve(llm, workload)
    result = {
        "input_tokens": workload.num_input_tokens,
        "output_tokens": workload.num_output_tokens,
        "seconds": seconds,
        "output_tokens_per_second": workload.num_output_tokens / seconds,
        "total_tokens_per_second": (workload.num_input_tokens + workload.num_output_tokens) / seconds,
        "steps": num_steps,
        "mean_batch": workload.num_output_tokens / num_steps,
        "startup_seconds": startup_seconds,
        **peak_memory(),
    }
    return Report("throughput", facts, {"requests": args.num_seqs, "seed": llm.config.seed}, [result])


def warm_up(llm: "LLM") -> None:
    """One short request, so that what happens only once is not measured; it leaves nothing in the prefix cache."""
    from nanovllm import SamplingParams

    llm.generate([[0, 1, 2, 3]], SamplingParams(temperature=0.6, max_tokens=4, ignore_eos=True), use_tqdm=False)
    llm.reset_prefix_cache()


def serve(llm: "LLM", workload: "Workload") -> tuple[float, int]:
    """Hand over all requests, step until all are done; seconds and number of steps."""
    from tqdm import tqdm

    num_steps = 0
    # tqdm reads disable=None as "only on a terminal".
    with tqdm(total=workload.num_output_tokens, unit="tok", desc="Generating", disable=None) as bar:
        begin = shown = time.perf_counter()
        for prompt, params in zip(workload.prompts, workload.params, strict=True):
            llm.add_request(prompt, params)
        while not llm.is_finished():
            done = llm.step()
            num_steps += 1
            bar.update(sum(len(output["token_ids"]) for output in done))
            if time.perf_counter() - shown > REFRESH_SECONDS:
                shown = time.perf_counter()
                bar.set_postfix_str(f"step {num_steps}, {llm.num_unfinished_requests} requests left")
        return time.perf_counter() - begin, num_steps


def _warn_if_long(workload: "Workload") -> None:
    import torch

    num_tokens = workload.num_input_tokens + workload.num_output_tokens
    if not torch.cuda.is_available() and num_tokens > LONG_ON_A_CPU:
        print(
            f"{num_tokens:,} tokens take long on a CPU; a smaller workload: "
            "--num-seqs 16 --input-len 64:256 --output-len 64:128",
            file=sys.stderr,
        )
