"""Which kernels a decode step runs, how long each takes, and how long the GPU is idle.

A GPU is idle between two kernels of a step (launch, last blocks of one kernel and first blocks of the next) and between
two steps (waiting for Python or for a copy). In a CUDA graph the first gap is at most a microsecond; with one step
scheduled ahead the second should be zero. The plot shows both: bars are kernels, white is idle time.

All sequences of a batch decode. After some unmeasured steps `torch.profiler` records the start and the end of every
kernel, also inside CUDA graphs; the first and the last recorded steps are dropped. Recording slows the steps down a
little, so read percentages here and milliseconds in `nanovllm bench latency`.

  idle percent       time in which no kernel ran; copies do not count as kernels
  long gaps percent  time in gaps of more than 5 µs, in which the GPU waited for the host
  kernels/step       number of kernels in one step

A second table lists the kernels that took the most time for each batch size. --svg FILE draws two steps of each.

On a CPU the parts of the native step are listed instead, with their share of the step's time.
"""

import argparse
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import count, counts
from nanovllm.bench.decoding import decoding
from nanovllm.bench.report import Report, Row, environment, table
from nanovllm.errors import EngineError
from nanovllm.kernels.select import linear_symbols

if TYPE_CHECKING:
    from nanovllm.llm import LLM

EDGE_STEPS = 2  # steps dropped at the start and at the end of the recording
LONG_GAP_US = 5.0
NUM_KERNELS_SHOWN = 12
NAME_WIDTH = 60
# A kernel is of the first kind whose pattern matches its name.
KINDS = {
    "copy": r"memcpy|memset",
    "attention": r"attention|attn|flash|fmha|decode|prefill|latent|_plan_kernel",
    "linear": "|".join(["gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|splitk", *linear_symbols()]),
    "delta net, convolution": r"_recurrent_kernel|_conv_\w+_kernel|_chunk_\w+_kernel|_norm_heads_kernel",
    "sampling": r"sample|_cut_kernel|argmax|logit",
    "norm, rotation, activation": r"",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batch-sizes",
        type=counts,
        metavar="N,N",
        help="Batch sizes to profile. Default: 16,64,256; on a CPU 1,16.",
    )
    parser.add_argument(
        "--input-len", type=count, metavar="N", help="Prompt length in tokens. Default: 960; on a CPU 128."
    )
    parser.add_argument(
        "--steps", type=count, default=20, metavar="N", help="Number of steps to record. Default: %(default)s."
    )
    parser.add_argument(
        "--svg", type=Path, metavar="FILE", help="Draw two steps of each batch size into this SVG file."
    )


def run(args: argparse.Namespace, engine: dict[str, Any]) -> Report:
    from nanovllm.bench.throughput import runs_on_gpu

    if not runs_on_gpu(engine):
        from nanovllm.bench.native_profile import profile_native

        return profile_native(args, engine)
    from nanovllm import LLM
    from nanovllm.bench.throughput import warm_up

    sizes, input_len = args.batch_sizes or [16, 64, 256], args.input_len or 960
    if args.svg is not None:
        args.svg.write_text("")  # fails now, not after the measurement, if the path cannot be written
    with LLM(**{"skip_tokenizer_init": True, **engine}) as llm:
        facts = environment(llm)
        warm_up(llm)
        found = {size: record_decode(llm, size, input_len, args.steps) for size in sizes}
    if args.svg is not None:
        args.svg.write_text(draw(found))
    rows = [{"batch_size": size, **steps.row()} for size, steps in found.items()]
    kernels = {f"batch {size}": steps.kernel_rows() for size, steps in found.items()}
    return ProfileReport("profile", facts, {"input_len": input_len, "steps": args.steps}, rows, kernels)


@dataclass(frozen=True)
class ProfileReport(Report):
    """The report with one more table of kernels per batch size."""

    kernels: dict[str, list[Row]]

    def __str__(self) -> str:
        parts = [f"{title}\n{table(rows)}" for title, rows in self.kernels.items()]
        return "\n\n".join([super().__str__(), *parts])


# --- recorded kernels -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """One run of a kernel, or a copy."""

    name: str
    start: float  # µs
    end: float

    @property
    def kind(self) -> str:
        return next(kind for kind, pattern in KINDS.items() if re.search(pattern, self.name, re.IGNORECASE))


@dataclass(frozen=True)
class Steps:
    """The kernels of `num_steps` consecutive decode steps, ordered by their start."""

    kernels: list[Kernel]  # includes copies
    num_steps: int

    @property
    def microseconds(self) -> float:
        return max(kernel.end for kernel in self.kernels) - self.kernels[0].start

    def gaps(self) -> list[float]:
        """Lengths in µs of the times in which no kernel ran. Kernels may overlap."""
        running = [kernel for kernel in self.kernels if kernel.kind != "copy"]
        gaps, busy_until = [], running[0].end
        for kernel in running[1:]:
            if kernel.start > busy_until:
                gaps.append(kernel.start - busy_until)
            busy_until = max(busy_until, kernel.end)
        return gaps

    def idle_percent(self) -> float:
        return 100 * sum(self.gaps()) / self.microseconds

    def row(self) -> Row:
        long_gaps = [gap for gap in self.gaps() if gap > LONG_GAP_US]
        return {
            "step_ms": self.microseconds / self.num_steps / 1e3,
            "idle_percent": self.idle_percent(),
            "long_gaps_percent": 100 * sum(long_gaps) / self.microseconds,
            "kernels_per_step": sum(kernel.kind != "copy" for kernel in self.kernels) / self.num_steps,
            "copies_per_step": sum(kernel.kind == "copy" for kernel in self.kernels) / self.num_steps,
        }

    def kernel_rows(self) -> list[Row]:
        """The kernels with the most total time, grouped by name; times are per step."""
        by_name: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            by_name.setdefault(kernel.name, []).append(kernel)
        rows = [self._kernel_row(kernels) for kernels in by_name.values()]
        return sorted(rows, key=lambda row: -row["microseconds"])[:NUM_KERNELS_SHOWN]

    def _kernel_row(self, kernels: list[Kernel]) -> Row:
        microseconds = sum(kernel.end - kernel.start for kernel in kernels)
        return {
            "kind": kernels[0].kind,
            "microseconds": microseconds / self.num_steps,
            "percent": 100 * microseconds / self.microseconds,
            "launches": len(kernels) / self.num_steps,
            "each": microseconds / len(kernels),
            "kernel": _short(kernels[0].name),
        }

    def first(self, num_steps: int) -> "Steps":
        """The first steps. All steps run the same kernels, so a step is a fixed number of them."""
        count = round(len(self.kernels) * num_steps / self.num_steps)
        return Steps(self.kernels[:count], num_steps)


def middle_steps(kernels: Iterable[Kernel], num_steps: int) -> Steps:
    """The recorded steps without the first and the last ones, which starting and stopping the profiler disturbs."""
    in_order = sorted(kernels, key=lambda kernel: kernel.start)
    edge = round(len(in_order) * EDGE_STEPS / num_steps)
    return Steps(in_order[edge : len(in_order) - edge], num_steps - 2 * EDGE_STEPS)


def _short(name: str) -> str:
    name = name.removeprefix("void ")
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH - 1] + "…"


def record_decode(llm: "LLM", batch_size: int, input_len: int, num_steps: int) -> Steps:
    """Decode a batch and record `num_steps` of its steps after some unmeasured ones."""
    from torch.profiler import ProfilerActivity, profile

    num_recorded = num_steps + 2 * EDGE_STEPS
    with decoding(llm, batch_size, input_len, num_recorded), profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_recorded):
            llm.step()
    return middle_steps(_kernels(profiler.events()), num_recorded)


def _kernels(events: Iterable[Any]) -> list[Kernel]:
    """The profiler's device events, without annotations and synchronization."""
    from torch.autograd import DeviceType

    kernels = [
        Kernel(event.name, event.time_range.start, event.time_range.end)
        for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation and "Sync" not in event.name
    ]
    if not kernels:
        raise EngineError("torch.profiler recorded no kernel: it needs CUPTI and permission to read the GPU's counters")
    return kernels


# --- the plot ---------------------------------------------------------------------------------------------------------

WIDTH, MARGIN, LANE, PANEL = 960, 16, 44, 104  # pixels; a panel is a caption, a lane of bars and an axis
COLOURS = dict(zip(KINDS, ("#8c8c8c", "#3b6fb6", "#d98a29", "#c2453d", "#a24c9a", "#4f9e5b"), strict=True))
TEXT = 'font-family="sans-serif" font-size="13" fill="#222"'


def draw(found: dict[int, Steps], num_steps: int = 2) -> str:
    """An SVG with one lane per batch size and one bar per kernel, as wide as its time."""
    height = 2 * MARGIN + PANEL * len(found) + 20
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
    ]
    for index, (batch_size, steps) in enumerate(found.items()):
        caption = f"batch {batch_size}: {steps.idle_percent():.1f} % idle over {steps.num_steps} steps"
        lines += _panel(steps.first(min(num_steps, steps.num_steps)), caption, top=MARGIN + PANEL * index)
    lines += _legend(top=height - MARGIN)
    return "\n".join([*lines, "</svg>", ""])


def _panel(steps: Steps, caption: str, *, top: int) -> list[str]:
    scale = (WIDTH - 2 * MARGIN) / steps.microseconds
    lane = top + 22
    lines = [
        f'<text x="{MARGIN}" y="{top + 12}" {TEXT}>{caption}</text>',
        f'<rect x="{MARGIN}" y="{lane}" width="{WIDTH - 2 * MARGIN}" height="{LANE}" fill="none" stroke="#ccc"/>',
    ]
    for kind, colour in COLOURS.items():
        bars = [kernel for kernel in steps.kernels if kernel.kind == kind]
        if bars:
            lines.append(f'<path fill="{colour}" d="{_bars(bars, steps.kernels[0].start, scale, lane)}"/>')
    length = f"{steps.microseconds:,.0f} µs, {steps.num_steps} steps"
    axis = lane + LANE + 16
    lines.append(f'<text x="{MARGIN}" y="{axis}" {TEXT}>0</text>')
    lines.append(f'<text x="{WIDTH - MARGIN}" y="{axis}" text-anchor="end" {TEXT}>{length}</text>')
    return lines


def _bars(kernels: Sequence[Kernel], origin: float, scale: float, top: int) -> str:
    parts = []
    for kernel in kernels:
        left, width = MARGIN + (kernel.start - origin) * scale, (kernel.end - kernel.start) * scale
        parts.append(f"M{left:.2f} {top}h{width:.2f}v{LANE}h-{width:.2f}z")
    return "".join(parts)


def _legend(*, top: int) -> list[str]:
    lines, left = [], MARGIN
    for kind, colour in COLOURS.items():
        lines.append(f'<rect x="{left}" y="{top - 10}" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{left + 18}" y="{top}" {TEXT}>{kind}</text>')
        left += 44 + 8 * len(kind)
    return lines
