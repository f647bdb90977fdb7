"""The `nanovllm` command: parses the arguments, runs a subcommand, and returns an exit code.

    0    success                  130  Ctrl-C
    1    the command failed       141  the reader of stdout closed the pipe
    2    wrong arguments

Imports are inside the functions so that Ctrl-C is handled during them and `--help` loads nothing heavy.
"""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from argparse import Namespace
    from collections.abc import Sequence

    from nanovllm.cli.parser import Parser

DESCRIPTION = "A small, fast LLM inference engine. The default model is SmolLM2-135M-Instruct."
EPILOG = """\
examples:
  nanovllm generate "What is the capital of Germany?"
  nanovllm chat --model path/to/Qwen3-0.6B --temperature 0.6
  nanovllm serve --port 8000
  nanovllm plan model.gguf
  nanovllm bench throughput --num-seqs 16 --input-len 64:256 --output-len 64:128
  nanovllm simulate --synthetic groups=256 --rate 80 --replicas 8 --compare

A model is a folder with safetensors files, a .gguf file, or a Hugging Face hub id (org/name).
'nanovllm COMMAND --help' lists a command's options.
"""


def main(argv: "Sequence[str] | None" = None) -> int:
    try:
        code = _run(argv)
        print(end="", flush=True)  # raises BrokenPipeError if the reader has closed the pipe
    except KeyboardInterrupt:
        if sys.stderr.isatty():
            print(file=sys.stderr)  # end the line on which the terminal shows ^C
        code = 130
    except BrokenPipeError:
        _drop_output()
        code = 141
    return code


def _run(argv: "Sequence[str] | None") -> int:
    from nanovllm.errors import ConfigError, NanoError

    _replace_unencodable_characters()
    try:
        args, unknown = _parser().parse_known_args(argv)
        if unknown:
            args.parser.refuse_unknown(unknown)
        _configure_logging()
        return args.run(args)
    except SystemExit as leave:  # argparse: after --help, --version or a wrong argument
        return leave.code if isinstance(leave.code, int) else 0
    except BrokenPipeError:
        raise
    except ConfigError as error:
        return _fail(error, 2)
    except (NanoError, OSError) as error:
        return _fail(error, 1)


def _parser() -> "Parser":
    from nanovllm import __version__
    from nanovllm.cli import bench, chat, generate, plan, serve, simulate
    from nanovllm.cli.parser import Parser

    parser = Parser(prog="nanovllm", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("--version", action="version", version=f"nanovllm {__version__}")
    parser.set_defaults(run=_no_command)
    commands = parser.add_subparsers(metavar="COMMAND", title="commands", prog=parser.prog)
    modules = {"generate": generate, "chat": chat, "serve": serve, "bench": bench, "plan": plan, "simulate": simulate}
    for name, module in modules.items():
        command = commands.add_parser(
            name,
            usage=f"%(prog)s {module.USAGE}",
            help=module.SUMMARY,
            description=module.DESCRIPTION,
            epilog=module.EPILOG,
        )
        command.set_defaults(run=module.run)
        module.add_arguments(command)
    return parser


def _no_command(args: "Namespace") -> int:
    args.parser.print_help(sys.stderr)
    return 2


def _configure_logging() -> None:
    from nanovllm.utils.logging import configure_cli_logging

    configure_cli_logging()


def _fail(error: Exception, code: int) -> int:
    print(f"nanovllm: error: {error}", file=sys.stderr)
    return code


def _replace_unencodable_characters() -> None:
    """Write "?" for characters that the terminal's encoding does not have, instead of failing."""
    from io import TextIOWrapper

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


def _drop_output() -> None:
    """Redirect stdout to /dev/null: the interpreter would report the broken pipe when it flushes at exit."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
