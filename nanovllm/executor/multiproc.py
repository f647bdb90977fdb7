"""Ranks as child processes of this one, each at the other end of a socket.

Blocked reads on both sides: an idle worker costs nothing. Names and ports are nobody's to choose, so any number of
executors can live side by side. A thread watches for the end of a worker and ends the others, also while nobody asks.
"""

import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import repeat

import msgspec

from nanovllm.executor.messages import Lost, Reply
from nanovllm.executor.team import PATIENCE, Replies
from nanovllm.remote import children
from nanovllm.remote.frames import FrameReader

RECEIVE_BYTES = 1 << 16  # at once; memory for more would be new at every call
SECONDS_TO_EXIT = 2.0  # for a process that has hung up or was killed, until its exit status is there
WORKER = (sys.executable, "-m", "nanovllm.executor.worker")


class Processes:
    """Those of one crew, from start to end."""

    def __init__(self, command: Sequence[str], size: int) -> None:
        self.sockets: list[socket.socket] = []
        self.lost: dict[int, str] = {}  # how those ended that were not told to
        self._popens: list[subprocess.Popen[bytes]] = []
        self._lock = threading.RLock()
        self._ended = False
        self._watch = threading.Thread(target=self._end_with_the_first, name="nanovllm-workers", daemon=True)
        try:
            for _ in range(size):
                self._start_one(command)
        except BaseException:
            self.forget()
            raise
        self._watch.start()

    def _start_one(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self.sockets.append(ours)
        self._popens.append(children.start(command, theirs))

    @property
    def pids(self) -> list[int]:
        return [popen.pid for popen in self._popens]

    def _end_with_the_first(self) -> None:
        self._hung_up(None)
        self.end(PATIENCE)

    def end(self, patience: float = 0.0) -> None:
        """Kill those still alive. From any thread, and as often as one likes."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            try:
                deadline = time.monotonic() + patience
                while found := self._hung_up(max(0.0, deadline - time.monotonic())):
                    self.lost |= {rank: self._how_ended(rank) for rank in found}
            finally:
                self._kill()

    def leave(self) -> None:
        """From now on the end of a worker is no failure."""
        with self._lock:
            self._ended = True

    def join(self, timeout: float) -> None:
        """Wait for the end of all, and kill those that do not come to it in time."""
        try:
            self._reap(timeout)
        finally:
            self._kill()

    def close(self) -> None:
        """Once all have ended."""
        if self._watch.is_alive() and self._watch is not threading.current_thread():
            self._watch.join(SECONDS_TO_EXIT)
        for sock in self.sockets:
            sock.close()

    def forget(self) -> None:
        self.end()
        self.close()

    def _kill(self) -> None:
        for popen in self._popens:
            popen.kill()
        self._reap(SECONDS_TO_EXIT)

    def _hung_up(self, timeout: float | None) -> list[int]:
        """Who did, of those not known to be lost; waits for one if there is none."""
        poll = select.poll()
        ranks = {sock.fileno(): rank for rank, sock in enumerate(self.sockets) if rank not in self.lost}
        for fd in ranks:
            poll.register(fd, 0)  # a hang-up is reported unasked
        if not ranks:
            return []
        return [ranks[fd] for fd, _ in poll.poll(None if timeout is None else 1000 * timeout)]

    def _how_ended(self, rank: int) -> str:
        try:
            status = self._popens[rank].wait(SECONDS_TO_EXIT)
        except subprocess.TimeoutExpired:
            return "hung up"
        return f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"

    def _reap(self, timeout: float) -> None:
        """As many as come to their end in this time, all together."""
        deadline = time.monotonic() + timeout
        for popen in self._popens:
            with suppress(subprocess.TimeoutExpired):
                popen.wait(max(0.0, deadline - time.monotonic()))


def at_once(calls: Iterable[object]) -> None:
    """Run lazy calls of C functions to their end. Ctrl-C comes between Python's instructions, and here are none: what
    was sent is always struck off, what was received always kept."""
    deque(calls, maxlen=0)


class Line:
    """This process's end of a worker's socket. Sending does not wait: what does not fit yet goes out later."""

    def __init__(self, sock: socket.socket) -> None:
        self.unsent = bytearray()
        self._socket = sock
        self._frames = FrameReader()
        self._decoder = msgspec.msgpack.Decoder(Reply)

    def flush(self) -> None:
        with suppress(BlockingIOError, ConnectionError):  # a hang-up is also seen by who reads
            while self.unsent:
                at_once(map(self.unsent.__delitem__, map(slice, map(self._socket.send, (self.unsent,)))))

    @property
    def events(self) -> int:
        """What to wait for."""
        return select.POLLIN | (select.POLLOUT if self.unsent else 0)

    def read(self) -> list[Reply]:
        """What is there. EOFError once the worker is gone and all it said was read."""
        with suppress(BlockingIOError):
            return self._receive()
        return []

    def last_words(self) -> list[Reply]:
        """All that a worker said before it ended."""
        replies: list[Reply] = []
        with suppress(EOFError, BlockingIOError):
            while True:
                replies += self._receive()
        return replies

    def _receive(self) -> list[Reply]:
        unread = self._frames.unread
        before = len(unread)
        try:
            at_once(map(unread.extend, map(self._socket.recv, (RECEIVE_BYTES,))))
        except ConnectionError as error:
            raise EOFError from error
        if len(unread) == before:
            raise EOFError
        return [self._decoder.decode(frame) for frame in self._frames.take()]


class ProcessCrew:
    host = "127.0.0.1"

    def __init__(self, size: int, *, command: Sequence[str] | None = None) -> None:
        self.size = size
        self.local_ranks = list(range(size))
        self.num_local = [size] * size
        self._processes = Processes(command or WORKER, size)
        self._lines = [Line(sock) for sock in self._processes.sockets]
        self._ranks = {sock.fileno(): rank for rank, sock in enumerate(self._processes.sockets)}
        self._poll = select.poll()
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)
        self._closed = False
        self._forget = weakref.finalize(self, self._processes.forget)  # at exit, or if nobody closes this

    @property
    def pids(self) -> list[int]:
        return self._processes.pids

    def send(self, frame: bytes, ranks: Iterable[int]) -> None:
        lines = [self._lines[rank] for rank in ranks]
        at_once(map(bytearray.extend, [line.unsent for line in lines], repeat(frame)))
        for line in lines:
            line.flush()

    def receive(self, timeout: float | None) -> Replies:
        for fd, rank in self._ranks.items():
            self._poll.modify(fd, self._lines[rank].events)
        ready = self._poll.poll(None if timeout is None else 1000 * timeout)
        return self._read([self._ranks[fd] for fd, _ in ready])

    def _read(self, ranks: Iterable[int]) -> Replies:
        replies: Replies = []
        for rank in ranks:
            self._lines[rank].flush()
            try:
                replies += [(rank, reply) for reply in self._lines[rank].read()]
            except EOFError:
                return replies + self.end(PATIENCE)
        return replies

    def end(self, patience: float = 0.0) -> Replies:
        if self._closed:
            return []
        self._processes.end(patience)
        replies = [(rank, reply) for rank, line in enumerate(self._lines) for reply in line.last_words()]
        replies += [(rank, Lost(how)) for rank, how in self._processes.lost.items()]
        self._close()
        return replies

    def close(self, farewell: bytes, timeout: float) -> None:
        if self._closed:
            return
        self._processes.leave()
        try:
            self.send(farewell, range(self.size))
            self._processes.join(timeout)
        finally:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._forget.detach()
        self._processes.close()
