"""`nanovllm chat`: a conversation in the terminal."""

import argparse
import contextlib
import re
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

from nanovllm.cli.console import note, note_cut, note_speed, print_growing
from nanovllm.cli.options import add_engine_options, add_sampling_options, engine_options, sampling_params
from nanovllm.errors import RequestError
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.cli.parser import Parser
    from nanovllm.llm import LLM

SUMMARY = "chat in the terminal"
USAGE = "[options]"
DESCRIPTION = """\
Chat with the model; each line is a message. Earlier messages are in the prefix cache, so only the new message is
computed. When the conversation becomes longer than --max-model-len, its oldest turns are dropped.

  /reset           start a new conversation
  /exit, Ctrl-D    leave
  Ctrl-C           stop the answer; at the input prompt, leave
"""
EPILOG = """\
examples:
  nanovllm chat --system "You answer in one sentence."
  nanovllm chat --model path/to/Qwen3-0.6B --temperature 0.6 --top-p 0.95 --top-k 20
  printf '%s\\n' "My name is Ada." "What is my name?" | nanovllm chat
"""
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 512}


def add_arguments(parser: "Parser") -> None:
    parser.add_argument("--system", metavar="TEXT", help="System message of the conversation.")
    add_sampling_options(parser, DEFAULTS)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    params, engine = sampling_params(args, DEFAULTS), engine_options(args)
    from nanovllm import LLM

    with LLM(**engine) as llm:
        conversation = Conversation(llm, params, system=args.system, template_kwargs=args.chat_template_kwargs)
        conversation.check_template()
        if sys.stdin.isatty():
            note("/reset starts a new conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer")
        for line in _lines():
            if line == "/exit":
                break
            elif line == "/reset":
                conversation.reset()
                note("[new conversation]")
            elif re.fullmatch(r"/\w+", line):
                note(f"[unknown command {line}; the commands are /reset and /exit]")
            else:
                conversation.say(line)
    return 0


class Conversation:
    """The messages so far; the oldest turns are dropped when they exceed the model's context."""

    def __init__(
        self, llm: "LLM", params: SamplingParams, *, system: str | None, template_kwargs: dict[str, Any]
    ) -> None:
        self._llm = llm
        self._params = params
        self._template_kwargs = template_kwargs
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []  # user and assistant alternate
        room = llm.max_model_len // 4
        self._room = (
            room if params.max_tokens is None else min(params.max_tokens, room)
        )  # tokens reserved for an answer

    def check_template(self) -> None:
        """Raise if the model has no usable chat template, before the user types the first message."""
        self._render([{"role": "user", "content": "Hello"}])

    def reset(self) -> None:
        self._messages.clear()

    def say(self, text: str) -> None:
        """Add a message and print the answer. A refused message is removed from the conversation."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._answer()
        except RequestError as error:
            self._messages.pop()
            note(f"[refused: {error}]")
            return
        self._messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        prompt = self._fitting_prompt()
        with _deferred_interrupt() as pressed:
            output = print_growing(_until(pressed, self._llm.stream(prompt, self._params)))
        if pressed:
            note("[stopped]")
        note_cut(output)
        note_speed(output)
        return output["text"]

    def _fitting_prompt(self) -> dict[str, Any]:
        """Render the conversation, dropping its oldest turns until there is room for an answer."""
        num_dropped = 0
        while True:
            prompt = self._render(self._messages)
            excess = len(prompt["prompt_token_ids"]) + self._room - self._llm.max_model_len
            if excess <= 0 or len(self._messages) == 1:
                break
            del self._messages[:2]
            num_dropped += 1
        if num_dropped:
            turns = "turn was" if num_dropped == 1 else f"{num_dropped} turns were"
            limit = f"max_model_len={self._llm.max_model_len}"
            note(f"[the conversation exceeded {limit} tokens: its oldest {turns} dropped]")
        return prompt

    def _render(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return self._llm.render_chat(self._system + messages, chat_template_kwargs=self._template_kwargs)[0]


# --- the terminal -----------------------------------------------------------------------------------------------------


def _lines() -> Iterator[str]:
    """The non-empty lines of stdin. On a terminal each is read with a prompt and line editing."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (gives input() a line editor)
    while True:
        try:
            line = _ask().strip()
        except EOFError:
            note("")
            return
        if line:
            yield line


def _ask() -> str:
    if sys.stdout.isatty():
        return input("> ")
    print("> ", end="", file=sys.stderr, flush=True)
    return input()


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[list[int]]:
    """Record the first Ctrl-C at a terminal in the yielded list, so that it interrupts no engine step.

    The second one raises KeyboardInterrupt, and so does the first when the messages come from a pipe.
    """
    pressed: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        if pressed or not sys.stdin.isatty():
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _until(pressed: list[int], outputs: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    """Pass the outputs on until Ctrl-C was pressed; closing the stream aborts the request."""
    with contextlib.closing(outputs):  # type: ignore[type-var]
        for output in outputs:
            yield output
            if pressed:
                return
