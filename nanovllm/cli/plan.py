"""`nanovllm plan`: shows how much memory a model needs, without loading it."""

import argparse
import dataclasses
import json
from typing import TYPE_CHECKING

from nanovllm.cli.options import add_engine_options, engine_options

if TYPE_CHECKING:
    from nanovllm.cli.parser import Parser

SUMMARY = "show how much memory a model needs"
USAGE = "[options] [MODEL]"
DESCRIPTION = "Show the size of the weights and of the KV cache, and how many tokens fit, without loading the model."
EPILOG = """\
examples:
  nanovllm plan
  nanovllm plan path/to/Qwen3-0.6B --max-model-len 32768 --kv-cache-memory-bytes 4G
  nanovllm plan model.gguf --dtype bfloat16 --json
"""


def add_arguments(parser: "Parser") -> None:
    parser.add_argument("planned", nargs="?", metavar="MODEL", help="The same as --model.")
    parser.add_argument("--json", action="store_true", help="Print the plan as one JSON document.")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    engine = engine_options(args)
    if args.planned is not None and engine.setdefault("model", args.planned) != args.planned:
        args.parser.error(f"two models: {args.planned} and --model {engine['model']}; give one")
    from nanovllm.engine.memory_plan import make_plan

    plan = make_plan(engine.pop("model", None), engine)
    print(json.dumps({**dataclasses.asdict(plan), "num_tokens": plan.num_tokens}, indent=2) if args.json else plan)
    return 0
