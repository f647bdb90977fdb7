"""`stream_interval`: send several tokens of a stream in one chunk."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING

from nanovllm.remote.streams import merge_deltas

if TYPE_CHECKING:
    from nanovllm.engine.deltas import Delta

Numbered = tuple[int, "Delta"]  # number of the prompt, delta


async def in_intervals(deltas: AsyncGenerator[Numbered, None], interval: int) -> AsyncGenerator[Numbered, None]:
    """Merge the deltas of each completion until they have `interval` tokens. The first and the last are not delayed."""
    waiting: dict[tuple[int, int], Delta | None] = {}  # by prompt and completion, from its first delta on
    async with aclosing(deltas):
        async for number, delta in deltas:
            key = number, delta.index
            is_first, earlier = key not in waiting, waiting.get(key)
            if earlier is not None:
                merge_deltas(earlier, delta)
                delta = earlier
            if is_first or delta.finish_reason is not None or len(delta.token_ids) >= interval:
                waiting[key] = None
                yield number, delta
            else:
                waiting[key] = delta
