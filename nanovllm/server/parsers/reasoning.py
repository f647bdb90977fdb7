"""Split the reasoning, the text between two tags at the beginning, from the rest of a completion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from nanovllm.server.parsers.harmony import HARMONY
from nanovllm.server.parsers.text import partial_tag_length

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class ReasoningFormat:
    """The tags around the reasoning."""

    open: str = THINK_OPEN
    close: str = THINK_CLOSE  # a single token
    open_token: str = THINK_OPEN  # the first token of `open`; those after it count as reasoning tokens
    is_open: bool = False  # completions always begin inside the reasoning, whatever the prompt ends with


# The names are vLLM's.
REASONING_FORMATS = {
    "qwen3": ReasoningFormat(),
    "deepseek_r1": ReasoningFormat(is_open=True),
    "glm45": ReasoningFormat(),
    "glm47": ReasoningFormat(),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]", "[THINK]"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>", "<|channel>"),
}
REASONING_PARSERS = (HARMONY, *REASONING_FORMATS)  # harmony.py parses reasoning, content and calls alike


def opens_reasoning(prompt: str) -> bool:
    """True if the prompt ends with an opening tag, so that the completion begins inside the reasoning."""
    return prompt.rstrip().endswith(tuple(format.open for format in REASONING_FORMATS.values()))


def end_of_reasoning(prompt: str) -> str:
    """The text that ends the reasoning which the prompt opens, so that there is none; "" if the prompt opens none.

    Blanks are those that Qwen3.5's template writes: "<think>\\n" becomes "<think>\\n\\n</think>\\n\\n".
    """
    opened = prompt.rstrip()
    blanks = prompt[len(opened) :]
    closers = (format.close for format in REASONING_FORMATS.values() if opened.endswith(format.open))
    return next((f"{blanks}{close}{blanks}{blanks}" for close in closers), "")


class _Stage(Enum):
    OPENING = auto()
    REASONING = auto()
    GAP = auto()  # newlines between the closing tag and the content
    CONTENT = auto()


class ReasoningSplitter:
    """Splits a stream into reasoning and content. Newlines next to the tags are dropped.

    Without a closing tag, everything after the opening tag is reasoning, except tool calls: some models forget to close
    the reasoning before they call. So text from `call_opener` on is held back until this is decided.
    """

    def __init__(
        self,
        format: ReasoningFormat,
        *,
        starts_in_reasoning: bool,
        call_opener: str = "",  # "" = calls have no opener
        has_call: Callable[[str], bool] = lambda text: False,
    ) -> None:
        self._format = format
        self._call_opener, self._has_call = call_opener, has_call
        self._starts_in_reasoning = starts_in_reasoning
        self._stage = _Stage.OPENING
        self._tail = ""  # text that is held back because its meaning is not certain
        self._searched = 0  # the closing tag does not begin before this position of the tail
        self._has_reasoning = False  # some reasoning has been returned

    @property
    def is_over(self) -> bool:
        """True if all text from here on is content."""
        return self._stage is _Stage.CONTENT

    def feed(self, delta: str, *, finished: bool) -> tuple[str, str]:
        """The new reasoning and the new content, as (reasoning, content)."""
        if self._stage is _Stage.CONTENT:
            return "", delta
        self._tail += delta
        if self._stage is _Stage.OPENING:
            self._read_opening(finished)
        reasoning = self._read_reasoning(finished) if self._stage is _Stage.REASONING else ""
        if self._stage is _Stage.GAP:
            self._skip_gap()
        return reasoning, self._take(len(self._tail)) if self._stage is _Stage.CONTENT else ""

    def _read_opening(self, finished: bool) -> None:
        text, tag = self._tail.lstrip(), self._format.open
        if text.startswith(tag):
            self._tail = text[len(tag) :]
            self._stage = _Stage.REASONING
        elif finished or not tag.startswith(text):
            self._stage = _Stage.REASONING if self._starts_in_reasoning else _Stage.CONTENT

    def _read_reasoning(self, finished: bool) -> str:
        if not self._has_reasoning:
            self._take(len(self._tail) - len(self._tail.lstrip("\n")))
        tag, opener = self._format.close, self._call_opener
        end = self._tail.find(tag, self._searched)
        self._searched = max(self._searched, len(self._tail) - len(tag) + 1)
        call = self._tail.find(opener) if opener else -1
        if end >= 0:
            reasoning = self._take(end).rstrip("\n")
            self._take(len(tag))
            self._stage = _Stage.GAP
        elif finished and call >= 0 and self._has_call(self._tail[call:]):
            reasoning = self._take(call).rstrip("\n")
            self._stage = _Stage.CONTENT
        elif finished:
            reasoning = self._take(len(self._tail))
        else:
            held = max(partial_tag_length(self._tail, tag), partial_tag_length(self._tail, opener))
            certain = self._tail[: call if call >= 0 else len(self._tail) - held].rstrip("\n")
            reasoning = self._take(len(certain))
        self._has_reasoning = self._has_reasoning or bool(reasoning)
        return reasoning

    def _skip_gap(self) -> None:
        self._tail = self._tail.lstrip("\n")
        if self._tail:
            self._stage = _Stage.CONTENT

    def _take(self, count: int) -> str:
        taken, self._tail = self._tail[:count], self._tail[count:]
        self._searched = max(0, self._searched - count)
        return taken


class ReasoningTokenCounter:
    """Counts the tokens between the opening and the closing token."""

    def __init__(self, open_id: int | None, close_id: int, *, starts_in_reasoning: bool) -> None:
        self._open_id = open_id
        self._close_id = close_id
        self._is_inside = starts_in_reasoning
        self._is_over = False

    def feed(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, the next of the completion, are reasoning."""
        if self._is_over:
            return 0
        count = 0
        for token_id in token_ids:
            if token_id == self._close_id:
                self._is_over = True
                break
            if token_id == self._open_id:
                self._is_inside = True
            else:
                count += self._is_inside
        return count
