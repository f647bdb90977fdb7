"""`nanovllm bench`: runs one of the benchmarks and prints its report as a table or as JSON."""

import argparse
import sys
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from nanovllm.bench import (
    compare_llamacpp,
    compare_transformers,
    latency,
    perplexity,
    profile,
    serve,
    server_overhead,
    startup,
    throughput,
)
from nanovllm.bench.shapes import shape_names, with_shape
from nanovllm.cli.options import add_engine_options, engine_options

if TYPE_CHECKING:
    from nanovllm.cli.parser import Parser

SUMMARY = "measure throughput, latency or startup time"
USAGE = "NAME [options]"
DESCRIPTION = (
    "Measure this engine on this machine. 'nanovllm bench NAME --help' explains what a benchmark measures and how."
)
EPILOG = """\
examples:
  nanovllm bench throughput --num-seqs 16 --input-len 64:256 --output-len 64:128
  nanovllm bench throughput --model-shape qwen3-0.6b
  nanovllm bench latency --model path/to/Qwen3-0.6B --batch-sizes 1,8 --json
  nanovllm bench perplexity --texts README.md --quantization int4
  nanovllm bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --num-prompts 200
"""
BENCHMARKS: dict[str, ModuleType] = {
    "throughput": throughput,
    "latency": latency,
    "startup": startup,
    "profile": profile,
    "perplexity": perplexity,
    "compare-transformers": compare_transformers,
    "compare-llamacpp": compare_llamacpp,
    "serve": serve,
    "server-overhead": server_overhead,
}
# the comparisons need weights that the other side can load too, and random weights have no quality
WITHOUT_SHAPE = (compare_transformers, compare_llamacpp, perplexity)
WITHOUT_ENGINE = (serve, server_overhead)  # benchmarks that load no model in this process


def add_arguments(parser: "Parser") -> None:
    commands = parser.add_subparsers(metavar="NAME", title="benchmarks", prog=parser.prog)
    for name, module in BENCHMARKS.items():
        explanation = module.__doc__ or ""
        summary = explanation.split("\n")[0].removesuffix(".")
        command = commands.add_parser(name, usage="%(prog)s [options]", help=summary, description=explanation)
        command.add_argument("--json", action="store_true", help="Print the report as one JSON document.")
        module.add_arguments(command)
        command.set_defaults(run=partial(_run_benchmark, module))
        if module in WITHOUT_ENGINE:
            continue
        if module not in WITHOUT_SHAPE:
            _add_model_shape(command)
        add_engine_options(command)


def _add_model_shape(command: "Parser") -> None:
    known = ", ".join(shape_names())
    command.add_argument(
        "--model-shape",
        metavar="NAME",
        help=f"Model shape to measure with random weights (load format dummy), instead of --model. Known: {known}.",
    )


def run(args: argparse.Namespace) -> int:
    args.parser.print_help(sys.stderr)
    return 2


def _run_benchmark(module: ModuleType, args: argparse.Namespace) -> int:
    if module in WITHOUT_ENGINE:
        report = module.run(args)
    else:
        report = module.run(args, with_shape(engine_options(args), getattr(args, "model_shape", None)))
    print(report.to_json() if args.json else report)
    return 0
