"""An answer as a row of blocks (thinking, text, tool calls), each opened, grown and closed in turn.

The Responses and the Messages API both tell answers so, whole and streamed.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from nanovllm.server.calls import Call
from nanovllm.server.conversation import Prepared
from nanovllm.server.parsers.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from nanovllm.server.service import Service


@dataclass
class Block:
    number: int
    kind: Literal["thinking", "text", "tool"]
    call: ToolCallStart | None = None  # of a tool block
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What was written; of a tool call, its arguments as JSON."""
        return "".join(self.parts)


@dataclass(frozen=True)
class Opened:
    block: Block


@dataclass(frozen=True)
class Grew:
    block: Block
    text: str


@dataclass(frozen=True)
class Closed:
    block: Block


@dataclass(frozen=True)
class Ended:
    """The answer's end, behind its last block."""

    finish_reason: str
    stop_reason: int | str | None


Step = Opened | Grew | Closed | Ended


async def steps(service: Service, call: Call, ready: Prepared, *, priority: int = 0) -> AsyncGenerator[Step, None]:
    """The answer of a request with one completion. Begins when the engine has taken the request."""
    parser, writer = ready.parser.fresh(), _Writer()
    async with aclosing(service.generate(call, [ready.token_ids], ready.params, priority=priority)) as deltas:
        async for _, delta in deltas:
            finished = delta.finish_reason is not None
            if parser.passes_all:
                events: list[Event] = [ContentDelta(delta.text)] if delta.text else []
            else:
                call.num_reasoning_tokens += parser.count_thoughts(delta.token_ids)
                events = parser.feed(delta.text, finished=finished)
            for event in events:
                for step in writer.take(event):
                    yield step
            if delta.finish_reason is not None:
                for step in writer.close():
                    yield step
                yield Ended(delta.finish_reason, delta.stop_reason)


class _Writer:
    def __init__(self) -> None:
        self._open: Block | None = None
        self._num_blocks = 0

    def take(self, event: Event) -> Iterator[Step]:
        match event:
            case ReasoningDelta(text):
                yield from self._within("thinking")
            case ContentDelta(text):
                yield from self._within("text")
            case ToolCallStart():
                yield from self.close()
                yield self._begin(Block(self._num_blocks, "tool", event))
                return
            case ToolCallArguments(_, text):
                pass
        assert self._open is not None, "arguments follow the call they belong to"
        self._open.parts.append(text)
        yield Grew(self._open, text)

    def close(self) -> Iterator[Step]:
        if self._open is not None:
            yield Closed(self._open)
            self._open = None

    def _within(self, kind: Literal["thinking", "text"]) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self.close()
            yield self._begin(Block(self._num_blocks, kind))

    def _begin(self, block: Block) -> Opened:
        self._open = block
        self._num_blocks += 1
        return Opened(block)
