"""Several asynchronous streams as one, in the order in which their items come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")
ITEMS_IN_HAND = 64  # a reader that is slower than this holds the streams back


async def merge(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[tuple[int, Item], None]:
    """Each item with its stream's number.

    Ends with the last stream, or with the first error; then, and when it is closed, all of them are closed.
    """
    queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(ITEMS_IN_HAND)

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
            found = await queue.get()
            if found is None:
                num_open -= 1
            elif isinstance(found, Exception):
                raise found
            else:
                yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
