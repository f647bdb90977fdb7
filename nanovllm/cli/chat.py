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

SUMMARY = "hold a conversation in the terminal"
USAGE = "[options]"
DESCRIPTION = """\
Hold a conversation; each line is a message. What was said before is in the prefix cache, so only the new message is
computed. When the conversation outgrows --max-model-len, its oldest turns are forgotten.

  /reset           begin anew
  /exit, Ctrl-D    leave
  Ctrl-C           stop the answer; at the prompt, leave
"""
EPILOG = """\
examples:
  nanovllm chat --system "You answer in one sentence."
  nanovllm chat --model path/to/Qwen3-0.6B --temperature 0.6 --top-p 0.95 --top-k 20
  printf '%s\\n' "My name is Ada." "What is my name?" | nanovllm chat
"""
DEFAULTS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 512}


def add_arguments(parser: "Parser") -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    add_sampling_options(parser, DEFAULTS)
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    params, engine = sampling_params(args, DEFAULTS), engine_options(args)
    from nanovllm import LLM

    with LLM(**engine) as llm:
        conversation = Conversation(llm, params, system=args.system, template_kwargs=args.chat_template_kwargs)
        conversation.check_template()
        if sys.stdin.isatty():
            note("/reset begins anew, /exit or Ctrl-D leaves, Ctrl-C stops an answer")
        for line in _lines():
            if line == "/exit":
                break
            elif line == "/reset":
                conversation.reset()
                note("[the conversation begins anew]")
            elif re.fullmatch(r"/\w+", line):
                note(f"[{line} is no command; there are /reset and /exit]")
            else:
                conversation.say(line)
    return 0


class Conversation:
    """The messages so far, as many as the model has room for."""

    def __init__(
        self, llm: "LLM", params: SamplingParams, *, system: str | None, template_kwargs: dict[str, Any]
    ) -> None:
        self._llm = llm
        self._params = params
        self._template_kwargs = template_kwargs
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []  # user and assistant in turn
        room = llm.max_model_len // 4
        self._room = room if params.max_tokens is None else min(params.max_tokens, room)  # kept free for an answer

    def check_template(self) -> None:
        """Raise now if the model cannot hold a conversation, not when the user has typed the first message."""
        self._render([{"role": "user", "content": "Hello"}])

    def reset(self) -> None:
        self._messages.clear()

    def say(self, text: str) -> None:
        """Add a message and print the answer to it. A message that is refused leaves no trace."""
        self._messages.append({"role": "user", "content": text})
        try:
            answer = self._answer()
        except RequestError as error:
            self._messages.pop()
            note(f"[not understood: {error}]")
            return
        self._messages.append({"role": "assistant", "content": answer})

    def _answer(self) -> str:
        prompt = self._fitting_prompt()
        with _held_interrupt() as pressed:
            output = print_growing(_until(pressed, self._llm.stream(prompt, self._params)))
        if pressed:
            note("[stopped]")
        note_cut(output)
        note_speed(output)
        return output["text"]

    def _fitting_prompt(self) -> dict[str, Any]:
        """The conversation with room left for an answer; its oldest turns are forgotten where there is none."""
        forgotten = 0
        while True:
            prompt = self._render(self._messages)
            excess = len(prompt["prompt_token_ids"]) + self._room - self._llm.max_model_len
            if excess <= 0 or len(self._messages) == 1:
                break
            del self._messages[:2]
            forgotten += 1
        if forgotten:
            turns = "turn was" if forgotten == 1 else f"{forgotten} turns were"
            limit = f"max_model_len={self._llm.max_model_len}"
            note(f"[the conversation outgrew {limit} tokens: its oldest {turns} forgotten]")
        return prompt

    def _render(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return self._llm.render_chat(self._system + messages, chat_template_kwargs=self._template_kwargs)[0]


# --- the terminal -----------------------------------------------------------------------------------------------------


def _lines() -> Iterator[str]:
    """Messages as they are typed, without empty ones; from a pipe a line each, and no prompt."""
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
def _held_interrupt() -> Iterator[list[int]]:
    """Within, the first Ctrl-C of a person at the terminal is only noted, so that no engine step is torn apart.

    The next one leaves, and so does the first when the messages come from a pipe.
    """
    pressed: list[int] = []

    def hold(number: int, frame: FrameType | None) -> None:
        if pressed or not sys.stdin.isatty():
            raise KeyboardInterrupt
        pressed.append(number)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def _until(pressed: list[int], outputs: Iterator[RequestOutput]) -> Iterator[RequestOutput]:
    with contextlib.closing(outputs):  # type: ignore[type-var]
        for output in outputs:
            yield output
            if pressed:
                return
