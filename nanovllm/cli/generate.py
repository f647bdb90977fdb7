"""`nanovllm generate`: answers one prompt."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from nanovllm.cli.console import note, note_cut, note_speed, print_growing
from nanovllm.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_params
from nanovllm.errors import RequestError

if TYPE_CHECKING:
    from nanovllm.cli.parser import Parser
    from nanovllm.llm import LLM

SUMMARY = "answer one prompt"
USAGE = "[options] PROMPT"
DESCRIPTION = """\
Answer one prompt. Only the answer is written to stdout, while it is generated.

If the model has a chat template, the prompt is sent as a user message; --raw continues the text as it is.
"""
EPILOG = """\
examples:
  nanovllm generate "What is the capital of Germany?"
  nanovllm generate --raw "Once upon a time" --temperature 0.8 --seed 7
  nanovllm generate - < question.txt > answer.txt
"""
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 256}


def add_arguments(parser: "Parser") -> None:
    parser.add_argument("prompt", metavar="PROMPT", help="Text of the prompt. - reads it from stdin.")
    parser.add_argument("--raw", action="store_true", help="Continue the text as it is, without the chat template.")
    parser.add_argument("--system", metavar="TEXT", help="System message before the prompt.")
    add_sampling_options(parser, DEFAULTS)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    params, engine = sampling_params(args, DEFAULTS), engine_options(args)
    text = _read_prompt(args)
    from nanovllm import LLM

    with LLM(**engine) as llm:
        prompt = text if args.raw else _as_user_message(llm, text, args)
        output = print_growing(llm.stream(prompt, params))
    note_cut(output)
    note_speed(output)
    return 0


def _read_prompt(args: argparse.Namespace) -> str:
    text = sys.stdin.read().removesuffix("\n") if args.prompt == "-" else args.prompt
    if not text:
        args.parser.error("the prompt is empty")
    if args.raw and args.system is not None:
        args.parser.error("--system needs the chat template, which --raw does not use")
    return text


def _as_user_message(llm: "LLM", text: str, args: argparse.Namespace) -> Any:
    """Render the prompt as a user message; without a chat template, return it as it is."""
    messages = [{"role": "user", "content": text}]
    if args.system is not None:
        messages.insert(0, {"role": "system", "content": args.system})
    try:
        return llm.render_chat(messages, chat_template_kwargs=args.chat_template_kwargs)[0]
    except RequestError as error:
        if args.system is not None:
            raise
        note(f"[{error}; continuing the text as it is]")
        return text
