"""Queues between the reader of the engine's events and their consumers: deltas of one request, views."""

import asyncio

import msgspec

from nanovllm.engine.deltas import Delta
from nanovllm.errors import NanoError
from nanovllm.remote.messages import EngineView
from nanovllm.remote.views import MAX_STEPS_KEPT


class DeltaStream:
    """The deltas of one request. Deltas that wait for the consumer are merged, at most one per completion remains."""

    def __init__(self, num_completions: int) -> None:
        self._unfinished = set(range(num_completions))
        self._pending: dict[int, Delta] = {}
        self._error: NanoError | None = None
        self._waiting: asyncio.Future[None] | None = None  # set while the consumer waits

    def put(self, delta: Delta) -> None:
        waiting = self._pending.get(delta.index)
        if waiting is None:
            self._pending[delta.index] = delta
        else:
            merge_deltas(waiting, delta)
        if delta.finish_reason is not None:
            self._unfinished.discard(delta.index)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)

    @property
    def finished(self) -> bool:
        return not self._unfinished

    def abort(self, request_id: str) -> None:
        for index in sorted(self._unfinished):
            self.put(Delta(request_id, index, "", [], finish_reason="abort"))

    def fail(self, error: NanoError) -> None:
        """Raise this error in `take`, after the deltas that have arrived before it."""
        self._error = error
        self._wake()

    async def take(self) -> list[Delta]:
        """Wait for deltas, at most one per completion; an empty list once all completions have finished."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if self.finished:
                return []
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        taken, self._pending = self._pending, {}
        return list(taken.values())


def merge_deltas(into: Delta, later: Delta) -> None:
    """Append a later delta of the same completion to an earlier one."""
    into.text += later.text
    into.token_ids += later.token_ids
    if later.logprobs is not None:
        into.logprobs = (into.logprobs or []) + later.logprobs
    into.finish_reason, into.stop_reason = later.finish_reason, later.stop_reason


class ViewStream:
    """The newest view for one viewer, with the steps of the views that it missed."""

    def __init__(self) -> None:
        self._view: EngineView | None = None
        self._error: NanoError | None = None
        self._news = asyncio.Event()

    def put(self, view: EngineView) -> None:
        missed = [] if self._view is None else self._view.steps
        self._view = msgspec.structs.replace(view, steps=(missed + view.steps)[-MAX_STEPS_KEPT:])
        self._news.set()

    def fail(self, error: NanoError) -> None:
        self._error = error
        self._news.set()

    async def take(self) -> EngineView:
        while self._view is None:
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()
        view, self._view = self._view, None
        return view
