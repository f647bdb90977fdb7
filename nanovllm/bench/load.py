"""Sends requests to a server at their due times and records when each piece of each answer arrives.

All times are from one clock. The latency of a request counts from its due time, even if it could only be sent later.
"""

import asyncio
import json
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.bench.http_stream import EventReader, RequestFailed, Server, error_text, exchange
from nanovllm.bench.traces import Prompt, Request, text_of

DELTA_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")
FAILED_REASONS = ("abort", "error")  # finish reasons of an incomplete answer

Clock = Callable[[], float]


@dataclass(frozen=True)
class Target:
    """The server, and the fields that all requests have in common."""

    server: Server
    model: str
    endpoint: str = "/v1/completions"
    temperature: float = 0.0
    ignore_eos: bool = True
    as_text: bool = False  # send words instead of token ids
    extra_body: dict[str, Any] = field(default_factory=dict)
    timeout: float | None = None  # seconds per request

    def message(self, prompt: Prompt, output_len: int) -> bytes:
        body = {
            "model": self.model,
            **self._prompt(prompt),
            "max_tokens": output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"ignore_eos": True} if self.ignore_eos else {}),
            **self.extra_body,
        }
        return self.server.message("POST", self.endpoint, json.dumps(body, separators=(",", ":")).encode())

    def _prompt(self, prompt: Prompt) -> dict[str, Prompt]:
        is_chat = self.endpoint.endswith("/chat/completions")
        if isinstance(prompt[0], dict):
            return {"messages": prompt}
        if not isinstance(prompt, str) and (is_chat or self.as_text):
            prompt = text_of(token for token in prompt if isinstance(token, int))
        return {"messages": [{"role": "user", "content": prompt}]} if is_chat else {"prompt": prompt}


@dataclass(frozen=True)
class Outcome:
    """When one request was sent and answered, and how it ended."""

    begin: float  # the due time; without one, the time of sending
    sent: float
    ended: float
    piece_times: array  # arrival times of the pieces of the answer, from the first with content on
    num_input_tokens: int  # as the server reports; else the number of token ids that were sent
    num_output_tokens: int
    wanted_output_tokens: int
    failure: RequestFailed | None = None

    @property
    def first_token_seconds(self) -> float:
        return self.piece_times[0] - self.begin

    @property
    def seconds(self) -> float:
        """From `begin` to the last token."""
        return self.piece_times[-1] - self.begin

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time per token after the first; None if there is only one token."""
        if self.num_output_tokens < 2:
            return None
        return (self.piece_times[-1] - self.piece_times[0]) / (self.num_output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between consecutive pieces."""
        return [after - before for before, after in zip(self.piece_times, self.piece_times[1:], strict=False)]


async def drive(
    requests: Iterable[Request],
    target: Target,
    *,
    max_concurrency: int | None = None,
    on_end: Callable[[Outcome], None] = lambda outcome: None,
    clock: Clock = time.perf_counter,
) -> list[Outcome]:
    """Send every request once, in order. Failed requests are not retried."""
    slots = None if max_concurrency is None else asyncio.Semaphore(max_concurrency)
    outcomes: list[Outcome] = []

    async def send(prepared: _Prepared, due: float | None) -> None:
        outcome = await _send(target, prepared, due, clock)
        if slots is not None:
            slots.release()
        outcomes.append(outcome)
        on_end(outcome)

    start: float | None = None
    async with asyncio.TaskGroup() as group:
        for request in requests:
            prepared = _prepare(request, target)  # before the due time, so that it delays nothing
            start = clock() if start is None else start
            due = None if request.due is None else start + request.due
            if due is not None:
                await asyncio.sleep(max(0.0, due - clock()))
            if slots is not None:
                await slots.acquire()
            group.create_task(send(prepared, due))
    return sorted(outcomes, key=lambda outcome: outcome.begin)


@dataclass(frozen=True)
class _Prepared:
    message: bytes
    num_tokens: int  # of the prompt, 0 if it is text
    output_len: int


def _prepare(request: Request, target: Target) -> _Prepared:
    prompt = request.make_prompt()
    num_tokens = len(prompt) if isinstance(prompt[0], int) else 0
    return _Prepared(target.message(prompt, request.output_len), num_tokens, request.output_len)


async def _send(target: Target, prepared: _Prepared, due: float | None, clock: Clock) -> Outcome:
    sent = clock()
    answer = Answer(clock)
    failure = None
    try:
        async with asyncio.timeout(target.timeout):
            await exchange(target.server, prepared.message, answer.feed)
        answer.check_complete()
    except RequestFailed as error:
        failure = error
    except TimeoutError:
        failure = RequestFailed("timed out", f"after {target.timeout:g} s")
    return Outcome(
        begin=sent if due is None else due,
        sent=sent,
        ended=clock(),
        piece_times=answer.piece_times,
        num_input_tokens=answer.num_input_tokens or prepared.num_tokens,
        num_output_tokens=answer.num_output_tokens,
        wanted_output_tokens=prepared.output_len,
        failure=failure,
    )


class Answer:
    """Parses the stream of one answer and records when its pieces arrive."""

    def __init__(self, clock: Clock) -> None:
        self.piece_times = array("d")
        self.num_input_tokens = 0
        self._reported_tokens: int | None = None  # by the server
        self._is_finished = False
        self._events = EventReader()
        self._clock = clock

    @property
    def num_output_tokens(self) -> int:
        """As the server reports; if it does not, one token per piece."""
        return len(self.piece_times) if self._reported_tokens is None else self._reported_tokens

    def feed(self, body: bytes) -> None:
        now = self._clock()
        for event in self._events.feed(body):
            if event == b"[DONE]":
                self._is_finished = True
                continue
            try:
                chunk = json.loads(event)
                if chunk.get("error"):
                    raise RequestFailed("error in the stream", error_text(event))
                self._take_chunk(chunk, now)
            except (ValueError, TypeError, AttributeError, KeyError):
                raise RequestFailed("malformed response", f"event {event[:80]!r}") from None

    def _take_chunk(self, chunk: dict[str, Any], now: float) -> None:
        for choice in chunk.get("choices") or ():
            reason = choice.get("finish_reason")
            if reason in FAILED_REASONS:
                raise RequestFailed("error in the stream", f"finish_reason {reason!r}")
            delta = choice.get("delta") or {}
            has_content = choice.get("text") or any(delta.get(name) for name in DELTA_FIELDS)
            # tokens whose text is not complete yet have an empty piece; an empty one before the first has no token
            if has_content or (self.piece_times and ("text" in choice or "content" in delta)):
                self.piece_times.append(now)
            self._is_finished |= reason is not None
        usage = chunk.get("usage")
        if usage:
            self.num_input_tokens = int(usage["prompt_tokens"])
            self._reported_tokens = int(usage.get("completion_tokens") or 0)

    def check_complete(self) -> None:
        if not self._is_finished:
            raise RequestFailed("stream ended early", f"after {len(self.piece_times)} pieces")
        if not self.num_output_tokens:
            raise RequestFailed("empty answer")
        if not self.piece_times:  # tokens without text, such as special tokens: only their end is known
            self.piece_times.append(self._clock())
