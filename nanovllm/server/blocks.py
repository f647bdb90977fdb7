"""Turn a completion into events of content blocks (reasoning, text, tool calls): start, deltas and end of each.

The Responses and the Messages API describe their responses in content blocks.
"""

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from nanovllm.server.calls import Call
from nanovllm.server.conversation import PreparedChat
from nanovllm.server.parsers.events import ContentDelta, Event, ReasoningDelta, ToolCallArguments, ToolCallStart
from nanovllm.server.service import Service


@dataclass
class ContentBlock:
    """One block of a response, numbered from 0."""

    number: int
    kind: Literal["reasoning", "text", "tool"]
    call: ToolCallStart | None = None  # only of a tool block
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text generated so far; of a tool block, the arguments as JSON."""
        return "".join(self.parts)


@dataclass(frozen=True)
class BlockStart:
    block: ContentBlock


@dataclass(frozen=True)
class BlockDelta:
    block: ContentBlock
    text: str


@dataclass(frozen=True)
class BlockEnd:
    block: ContentBlock


@dataclass(frozen=True)
class ResponseEnd:
    """The end of the response, after its last block."""

    finish_reason: str
    stop_reason: int | str | None


BlockEvent = BlockStart | BlockDelta | BlockEnd | ResponseEnd


async def block_events(
    service: Service, call: Call, prepared: PreparedChat, *, priority: int = 0, cache_salt: str | None = None
) -> AsyncGenerator[BlockEvent, None]:
    """The events of a request with one completion. The first comes after the engine has accepted the request."""
    parser, assembler = prepared.parser.new_copy(), _BlockAssembler()
    generated = service.generate(call, [prepared.token_ids], prepared.params, priority=priority, cache_salt=cache_salt)
    async with aclosing(generated) as deltas:
        async for _, delta in deltas:
            finished = delta.finish_reason is not None
            if parser.is_content_only:
                events: list[Event] = [ContentDelta(delta.text)] if delta.text else []
            else:
                call.num_reasoning_tokens += parser.count_reasoning_tokens(delta.token_ids)
                events = parser.feed(delta.text, finished=finished)
            for event in events:
                for block_event in assembler.add(event):
                    yield block_event
            if delta.finish_reason is not None:
                for block_event in assembler.close():
                    yield block_event
                yield ResponseEnd(delta.finish_reason, delta.stop_reason)


class _BlockAssembler:
    """Groups the parser's events into blocks; at most one block is open at a time."""

    def __init__(self) -> None:
        self._open: ContentBlock | None = None
        self._num_blocks = 0

    def add(self, event: Event) -> Iterator[BlockEvent]:
        match event:
            case ReasoningDelta(text):
                yield from self._ensure_open("reasoning")
            case ContentDelta(text):
                yield from self._ensure_open("text")
            case ToolCallStart():
                yield from self.close()
                yield self._start(ContentBlock(self._num_blocks, "tool", event))
                return
            case ToolCallArguments(_, text):
                pass
        assert self._open is not None, "arguments follow the start of their call"
        self._open.parts.append(text)
        yield BlockDelta(self._open, text)

    def close(self) -> Iterator[BlockEvent]:
        """End the open block, if there is one."""
        if self._open is not None:
            yield BlockEnd(self._open)
            self._open = None

    def _ensure_open(self, kind: Literal["reasoning", "text"]) -> Iterator[BlockEvent]:
        if self._open is None or self._open.kind != kind:
            yield from self.close()
            yield self._start(ContentBlock(self._num_blocks, kind))

    def _start(self, block: ContentBlock) -> BlockStart:
        self._open = block
        self._num_blocks += 1
        return BlockStart(block)
