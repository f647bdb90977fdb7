"""Merge several asynchronous streams into one, in the order in which items arrive."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")
MAX_QUEUED_ITEMS = 64  # with this many unread items the streams wait for the reader


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Yield (number of the stream, item) for all items.

    Ends when all streams have ended, or raises the first error. In both cases, and when the merged stream is closed,
    all streams are closed.
    """
    queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(MAX_QUEUED_ITEMS)

    async def pump(number: int, stream: AsyncGenerator[Item, None]) -> None:
        ended: Exception | None = None
        try:
            async with aclosing(stream):
                async for item in stream:
                    await queue.put((number, item))
        except Exception as error:
            ended = error
        await queue.put(ended)

    tasks = [asyncio.create_task(pump(number, stream)) for number, stream in enumerate(streams)]
    try:
        num_open = len(tasks)
        while num_open:
            item = await queue.get()
            if item is None:
                num_open -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
