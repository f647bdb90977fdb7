"""Time to the first token and time per output token, for several batch sizes.

For the first token the whole prompt is computed, which takes arithmetic and grows with the prompt. For every further
token one token per sequence is computed, which reads memory: the weights once for the whole batch, and the KV cache of
each sequence. So the time of a step grows slowly with the batch until reading the KV cache, or the arithmetic, takes
longer than reading the weights; the batch sizes of this benchmark show where. Batch 1 shows the engine's overhead.

All requests of a batch arrive at once. A step counts as a decode step while all of them are decoding; the first few
decode steps are left out. The time of a step is the time between two results. The default on a GPU is batches of 1, 8,
64 and 256 with prompts of 960 tokens, each after an unmeasured run; on a CPU 1, 8 and 64 with 128 tokens.

  prefill seconds        time to compute all prompts of the batch, in a separate run with one output token per request
  ttft first ms          time to the first token of the first request of the batch
  ms/token, step p99 ms  median and 99th percentile of a decode step: the time between two tokens of a request
  fraction of roofline   the minimum time of such a step, divided by its median. The minimum is the time to read the
                         weights and the batch's KV cache at the measured memory bandwidth (or to do the arithmetic)
  prefill fraction       the same for the prefill, which is limited by arithmetic
  tokens/second          output tokens per second of the whole batch while it decodes
  busy p90 ms, ratio     with --beside-busy: the 90th percentile of a decode step in another run, while another process
                         keeps one core busy; and its ratio to the median without that process (ms/token)
"""

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count, counts
from nanovllm.bench.report import Report, Row, environment, peak_memory
from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    import subprocess

    from nanovllm.bench.roofline import Roofline
    from nanovllm.bench.workload import Workload
    from nanovllm.llm import LLM

GPU_BATCH_SIZES, CPU_BATCH_SIZES = [1, 8, 64, 256], [1, 8, 64]
GPU_INPUT_LEN, CPU_INPUT_LEN = 960, 128
MAX_SKIPPED_STEPS = 8  # unmeasured decode steps after the prefill; at most an eighth of all
WARM_UP_TOKENS = 4
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    pass"  # ends if the benchmark is killed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-sizes", type=counts, metavar="N,N", help="Batch sizes to measure. Default: 1,8,64, on a GPU also 256."
    )
    parser.add_argument(
        "--input-len", type=count, metavar="N", help="Prompt length in tokens. Default: 128, on a GPU 960."
    )
    parser.add_argument(
        "--output-len", type=count, default=64, metavar="N", help="Output length in tokens. Default: %(default)s."
    )
    parser.add_argument(
        "--beside-busy",
        action="store_true",
        help="Measure each batch again while another process keeps one core busy.",
    )


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    from nanovllm import LLM
    from nanovllm.bench.roofline import roofline_of
    from nanovllm.bench.throughput import runs_on_gpu, serve, warm_up
    from nanovllm.bench.workload import make_workload

    if args.output_len < 3:
        raise ConfigError(f"output_len={args.output_len}: must be at least 3, or there is no decode step to time")
    on_gpu = runs_on_gpu(engine)
    batch_sizes = args.batch_sizes or (GPU_BATCH_SIZES if on_gpu else CPU_BATCH_SIZES)
    input_len = args.input_len or (GPU_INPUT_LEN if on_gpu else CPU_INPUT_LEN)
    timings: dict[int, Timing] = {}  # by batch size
    busy_timings: dict[int, Timing] = {}
    # no text is needed; a model with a state per sequence might have room for fewer by default
    with LLM(**{"skip_tokenizer_init": True, "max_num_seqs": max(batch_sizes), **engine}) as llm:
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
            if args.beside_busy:
                llm.reset_prefix_cache()
                with busy_process():
                    busy_timings[batch_size] = time_steps(llm, workload, prefill_seconds)
        memory = peak_memory()
    roofline = roofline_of(llm)
    settings = {"input_len": input_len, "output_len": args.output_len, **memory, **roofline.machine.row()}
    rows = [_row(size, input_len, timing, roofline, busy_timings.get(size)) for size, timing in timings.items()]
    return Report("latency", facts, settings, rows)


@contextmanager
def busy_process() -> "Iterator[subprocess.Popen[bytes]]":
    """Keep one core busy within the block, by a process of its own."""
    import subprocess

    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def percentile(seconds: list[float], fraction: float) -> float:
    return sorted(seconds)[round(fraction * (len(seconds) - 1))]


@dataclass(frozen=True)
class Timing:
    """Seconds from the arrival of the batch; for `decode_steps`, seconds of each step."""

    prefill: float
    first_token_of_first: float
    num_skipped: int  # decode steps before those in `decode_steps`
    decode_steps: list[float]


def time_steps(llm: "LLM", workload: "Workload", prefill_seconds: float) -> Timing:
    """Run the workload and time its steps.

    Only the first and the last request are streamed, so that creating outputs does not add to the time of a step.
    """
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
            f"{len(names)} requests ended before the last one was decoding; raise them, or measure smaller batches"
        )
    num_skipped = min(MAX_SKIPPED_STEPS, len(decode_steps) // 8)
    return Timing(prefill_seconds, first_tokens[names[0]], num_skipped, decode_steps[num_skipped:])


def _row(batch_size: int, input_len: int, timing: Timing, roofline: "Roofline", busy: Timing | None) -> Row:
    from statistics import median

    middle = median(timing.decode_steps)
    steps = timing.decode_steps
    context = input_len + timing.num_skipped + (len(steps) + 1) // 2  # of the last request in the middle step
    min_prefill = roofline.prefill_seconds([input_len] * batch_size)
    row: Row = {
        "batch_size": batch_size,
        "prefill_seconds": timing.prefill,
        "ttft_first_ms": timing.first_token_of_first * 1e3,
        "ms_per_token": middle * 1e3,
        "step_p99_ms": percentile(steps, 0.99) * 1e3,
        "fraction_of_roofline": roofline.step_seconds(batch_size, context) / middle,
        "prefill_fraction": min_prefill / timing.prefill,
        "tokens_per_second": batch_size / middle,
        "steps": len(steps),
    }
    if busy is not None:
        busy_p90 = percentile(busy.decode_steps, 0.9)
        row |= {"busy_p90_ms": busy_p90 * 1e3, "busy_p90_ratio": busy_p90 / middle}
    return row
