"""Thinking split from the answer: text between <think> and </think> at the beginning."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from nanovllm.server.parsers.text import held_back

OPEN, CLOSE = "<think>", "</think>"

# Does the answer begin inside the thinking, whatever the prompt ends with?
REASONING_PARSERS = {"qwen3": False, "deepseek_r1": True}


def ends_in_thinking(prompt: str) -> bool:
    """Did the chat template open the thinking, so that the answer begins inside it?"""
    return prompt.rstrip().endswith(OPEN)


class _Stage(Enum):
    OPENING = auto()
    THINKING = auto()
    GAP = auto()  # newlines between </think> and the answer
    ANSWER = auto()


class ThinkingSplitter:
    """Newlines next to the tags belong to the tags. Thinking that is never closed is all of the answer."""

    def __init__(self, *, starts_inside: bool) -> None:
        self._starts_inside = starts_inside
        self._stage = _Stage.OPENING
        self._tail = ""  # what is not certain yet
        self._has_thought = False

    @property
    def is_over(self) -> bool:
        """Is all that comes content?"""
        return self._stage is _Stage.ANSWER

    def feed(self, delta: str, *, finished: bool) -> tuple[str, str]:
        """New reasoning, then new content."""
        if self._stage is _Stage.ANSWER:
            return "", delta
        self._tail += delta
        if self._stage is _Stage.OPENING:
            self._open(finished)
        reasoning = self._think(finished) if self._stage is _Stage.THINKING else ""
        if self._stage is _Stage.GAP:
            self._skip_gap()
        return reasoning, self._take(len(self._tail)) if self._stage is _Stage.ANSWER else ""

    def _open(self, finished: bool) -> None:
        text = self._tail.lstrip()
        if text.startswith(OPEN):
            self._tail = text[len(OPEN) :]
            self._stage = _Stage.THINKING
        elif finished or not OPEN.startswith(text):
            self._stage = _Stage.THINKING if self._starts_inside else _Stage.ANSWER

    def _think(self, finished: bool) -> str:
        if not self._has_thought:
            self._tail = self._tail.lstrip("\n")
        end = self._tail.find(CLOSE)
        if end >= 0:
            thought = self._take(end).rstrip("\n")
            self._take(len(CLOSE))
            self._stage = _Stage.GAP
        elif finished:
            thought = self._take(len(self._tail))
        else:
            certain = self._tail[: len(self._tail) - held_back(self._tail, CLOSE)].rstrip("\n")
            thought = self._take(len(certain))
        self._has_thought = self._has_thought or bool(thought)
        return thought

    def _skip_gap(self) -> None:
        self._tail = self._tail.lstrip("\n")
        if self._tail:
            self._stage = _Stage.ANSWER

    def _take(self, count: int) -> str:
        taken, self._tail = self._tail[:count], self._tail[count:]
        return taken


class ThinkingCounter:
    """How many tokens of an answer stand between the tags, which are tokens themselves."""

    def __init__(self, open_id: int | None, close_id: int, *, starts_inside: bool) -> None:
        self._open_id = open_id
        self._close_id = close_id
        self._is_inside = starts_inside
        self._is_over = False

    def feed(self, token_ids: Sequence[int]) -> int:
        """How many of these."""
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
