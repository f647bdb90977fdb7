"""How long a user waits: for the first token, and for each one after it.

The first token needs the whole prompt computed: arithmetic, growing with the prompt. Every later one needs a single
token computed per sequence: that is reading memory, the weights once for the whole batch and each sequence's own KV
cache. So a step grows slowly with the batch until the KV cache, or the arithmetic, outweighs the weights; where it
does is what the batch sizes of this benchmark show. At batch 1 it is the engine's own overhead that shows.

All requests of a batch arrive at once. A step counts as a decode step while all of them are decoding.

  ttft first, last ms    until the first and the last request of the batch have their first token
  step median, p99 ms    a decode step: the time between two tokens of a request
  tokens/second          of the whole batch while decoding
"""

import argparse
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count, counts
from nanovllm.bench.report import Report, Row, environment, peak_memory
from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from nanovllm.bench.workload import Workload
    from nanovllm.llm import LLM


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=counts, default=[1, 8, 64], metavar="N,N", help="default: 1,8,64")
    parser.add_argument("--input-len", type=count, default=128, metavar="N", help="prompt tokens; default: %(default)s")
    parser.add_argument("--output-len", type=count, default=64, metavar="N", help="new tokens; default: %(default)s")


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    from nanovllm import LLM
    from nanovllm.bench.throughput import warm_up
    from nanovllm.bench.workload import make_workload

    if args.output_len < 3:
        raise ConfigError(f"output_len={args.output_len}: must be at least 3, or there is no step to time")
    rows = []
    with LLM(**{"skip_tokenizer_init": True, **engine}) as llm:  # no text is made
        facts = environment(llm)
        warm_up(llm)
        for batch_size in args.batch_sizes:
            workload = make_workload(
                num_seqs=batch_size,
                input_len=(args.input_len, args.input_len),
                output_len=(args.output_len, args.output_len),
                seed=llm.config.seed,
                vocab_size=llm.model_config.vocab_size,
                temperature=0.0,
            )
            workload.check_fits(llm.max_model_len)
            llm.reset_prefix_cache()
            rows.append(_row(batch_size, time_steps(llm, workload)))
    settings = {"input_len": args.input_len, "output_len": args.output_len, **peak_memory()}
    return Report("latency", facts, settings, rows)


@dataclass(frozen=True)
class Timing:
    """Seconds from the arrival of the batch, except for the steps, which are seconds each."""

    first_token_of_first: float
    first_token_of_last: float
    decode_steps: list[float]


def time_steps(llm: "LLM", workload: "Workload") -> Timing:
    """Only the first and the last request are listened to, so that reporting costs nothing at any batch size."""
    begin = time.perf_counter()
    last_index = len(workload.prompts) - 1
    names = [
        llm.add_request(prompt, params, stream=index in (0, last_index))
        for index, (prompt, params) in enumerate(zip(workload.prompts, workload.params, strict=True))
    ]
    first_tokens: dict[str, float] = {}
    decode_steps: list[float] = []
    all_decode, before = True, begin
    while not llm.is_finished():
        outputs = llm.step()
        now = time.perf_counter()
        all_decode = all_decode and not any(output.finished for output in outputs)
        if names[-1] in first_tokens and all_decode:
            decode_steps.append(now - before)
        for output in outputs:
            first_tokens.setdefault(output.request_id, now - begin)
        before = now
    if not decode_steps:
        raise ConfigError(
            f"max_num_seqs={llm.config.max_num_seqs}, output_len={workload.output_lens[0]}: the first of "
            f"{len(names)} requests ended before the last was decoding; raise them, or measure smaller batches"
        )
    return Timing(first_tokens[names[0]], first_tokens[names[-1]], decode_steps)


def _row(batch_size: int, timing: Timing) -> Row:
    from statistics import median

    middle = median(timing.decode_steps)
    steps = sorted(timing.decode_steps)
    return {
        "batch_size": batch_size,
        "ttft_first_ms": timing.first_token_of_first * 1e3,
        "ttft_last_ms": timing.first_token_of_last * 1e3,
        "step_median_ms": middle * 1e3,
        "step_p99_ms": steps[min(len(steps) - 1, round(0.99 * (len(steps) - 1)))] * 1e3,
        "tokens_per_second": batch_size / middle,
        "steps": len(steps),
    }
