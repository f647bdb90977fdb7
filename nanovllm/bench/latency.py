"""How long a user waits: for the first token, and for each one after it.

The first token needs the whole prompt computed: arithmetic, growing with the prompt. Every later one needs a single
token computed per sequence: that is reading memory, the weights once for the whole batch and each sequence's own KV
cache. So a step grows slowly with the batch until the KV cache, or the arithmetic, outweighs the weights; where it
does is what the batch sizes of this benchmark show. At batch 1 it is the engine's own overhead that shows.

All requests of a batch arrive at once. A step counts as a decode step while all of them are decoding; the first few
are left out, and its time is the time between two results, whatever else is under way meanwhile. By default a GPU gets
batches of 1, 8, 64 and 256 with prompts of 960 tokens, each once unmeasured; a CPU 1, 8 and 64 with 128 tokens.

  prefill seconds        all prompts of the batch computed, in a run of its own in which each request ends there
  ttft first ms          until the first request of the batch has its first token
  ms/token, step p99 ms  a decode step, median and 99th percentile: the time between two tokens of a request
  fraction of roofline   the least time of such a step over its median. The least time is that of reading the weights
                         and the batch's keys and values at the memory bandwidth measured here (or of the arithmetic)
  prefill fraction       the same for the prefill, where it is the arithmetic that counts
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
    from nanovllm.bench.roofline import Roofline
    from nanovllm.bench.workload import Workload
    from nanovllm.llm import LLM

GPU_BATCH_SIZES, CPU_BATCH_SIZES = [1, 8, 64, 256], [1, 8, 64]
GPU_INPUT_LEN, CPU_INPUT_LEN = 960, 128
MOST_UNSETTLED_STEPS = 8  # after the prefill; an eighth of the steps where there are few
WARM_UP_TOKENS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batch-sizes", type=counts, metavar="N,N", help="default: 1,8,64; on a GPU also 256")
    parser.add_argument("--input-len", type=count, metavar="N", help="prompt tokens; default: 128; on a GPU 960")
    parser.add_argument("--output-len", type=count, default=64, metavar="N", help="new tokens; default: %(default)s")


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    from nanovllm import LLM
    from nanovllm.bench.roofline import roofline_of
    from nanovllm.bench.throughput import runs_on_gpu, serve, warm_up
    from nanovllm.bench.workload import make_workload

    if args.output_len < 3:
        raise ConfigError(f"output_len={args.output_len}: must be at least 3, or there is no step to time")
    on_gpu = runs_on_gpu(engine)
    batch_sizes = args.batch_sizes or (GPU_BATCH_SIZES if on_gpu else CPU_BATCH_SIZES)
    input_len = args.input_len or (GPU_INPUT_LEN if on_gpu else CPU_INPUT_LEN)
    timings = {}
    with LLM(**{"skip_tokenizer_init": True, **engine}) as llm:  # no text is made
        facts = environment(llm)
        warm_up(llm)
        for batch_size in batch_sizes:
            workload = make_workload(
                num_seqs=batch_size,
                input_len=(input_len, input_len),
                output_len=(args.output_len, args.output_len),
                seed=llm.config.seed,
                vocab_size=llm.model_config.vocab_size,
                temperature=0.0,
            )
            workload.check_fits(llm.max_model_len)
            if on_gpu:
                serve(llm, workload.first_tokens(WARM_UP_TOKENS))
            llm.reset_prefix_cache()
            prefill_seconds = serve(llm, workload.first_tokens(1)).seconds
            llm.reset_prefix_cache()
            timings[batch_size] = time_steps(llm, workload, prefill_seconds)
        memory = peak_memory()
    roofline = roofline_of(llm)
    settings = {"input_len": input_len, "output_len": args.output_len, **memory, **roofline.machine.row()}
    rows = [_row(batch_size, input_len, timing, roofline) for batch_size, timing in timings.items()]
    return Report("latency", facts, settings, rows)


@dataclass(frozen=True)
class Timing:
    """Seconds from the arrival of the batch, except for the steps, which are seconds each."""

    prefill: float
    first_token_of_first: float
    num_unsettled: int  # decode steps left out before those below
    decode_steps: list[float]


def time_steps(llm: "LLM", workload: "Workload", prefill_seconds: float) -> Timing:
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
    num_unsettled = min(MOST_UNSETTLED_STEPS, len(decode_steps) // 8)
    return Timing(prefill_seconds, first_tokens[names[0]], num_unsettled, decode_steps[num_unsettled:])


def _row(batch_size: int, input_len: int, timing: Timing, roofline: "Roofline") -> Row:
    from statistics import median

    middle = median(timing.decode_steps)
    steps = sorted(timing.decode_steps)
    context = input_len + timing.num_unsettled + (len(steps) + 1) // 2  # of the last request in the middle step
    least_prefill = roofline.prefill_seconds([input_len] * batch_size)
    return {
        "batch_size": batch_size,
        "prefill_seconds": timing.prefill,
        "ttft_first_ms": timing.first_token_of_first * 1e3,
        "ms_per_token": middle * 1e3,
        "step_p99_ms": steps[min(len(steps) - 1, round(0.99 * (len(steps) - 1)))] * 1e3,
        "fraction_of_roofline": roofline.step_seconds(batch_size, context) / middle,
        "prefill_fraction": least_prefill / timing.prefill,
        "tokens_per_second": batch_size / middle,
        "steps": len(steps),
    }
