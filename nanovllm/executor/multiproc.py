"""Workers as child processes of this one, each at the other end of a socket.

Both sides block while they wait, so an idle worker uses no CPU time. No fixed names or ports are used, so any number of
executors can run at the same time. A thread notices when a worker ends and kills the others, even between steps.
"""

import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from contextlib import suppress

import msgspec

from nanovllm.executor.messages import Lost, Reply
from nanovllm.executor.workers import GRACE_SECONDS, Replies
from nanovllm.remote.transport import Transport, send_to_all
from nanovllm.utils.child_process import start_child

SECONDS_TO_EXIT = 2.0  # from a process's hang-up or kill until its exit status must be there
WORKER = (sys.executable, "-m", "nanovllm.executor.worker")


class Processes:
    """The processes of one executor, from start to end."""

    def __init__(self, command: Sequence[str], size: int) -> None:
        self.transports: list[Transport] = []
        self.lost: dict[int, str] = {}  # how the workers ended that were not asked to
        self._popens: list[subprocess.Popen[bytes]] = []
        self._lock = threading.RLock()
        self._ended = False
        self._watcher = threading.Thread(target=self._end_with_the_first, name="nanovllm-workers", daemon=True)
        try:
            for _ in range(size):
                self._start_one(command)
        except BaseException:
            self.discard()
            raise
        self._watcher.start()

    def _start_one(self, command: Sequence[str]) -> None:
        ours, theirs = socket.socketpair()
        self.transports.append(Transport(ours))
        self._popens.append(start_child(command, theirs))

    @property
    def pids(self) -> list[int]:
        return [popen.pid for popen in self._popens]

    def _end_with_the_first(self) -> None:
        self._hung_up(None)
        self.end(GRACE_SECONDS)

    def end(self, grace_seconds: float = 0.0) -> None:
        """Kill the processes that are still alive; first wait `grace_seconds` and note which end by themselves.

        May be called from any thread and any number of times.
        """
        with self._lock:
            if self._ended:
                return
            self._ended = True
            try:
                deadline = time.monotonic() + grace_seconds
                while found := self._hung_up(max(0.0, deadline - time.monotonic())):
                    self.lost |= {rank: self._how_ended(rank) for rank in found}
            finally:
                self._kill()

    def expect_end(self) -> None:
        """From now on a worker that ends is not a failure."""
        with self._lock:
            self._ended = True

    def join(self, timeout: float) -> None:
        """Wait until all have ended; kill those that still run after `timeout` seconds."""
        try:
            self._reap(timeout)
        finally:
            self._kill()

    def close(self) -> None:
        """Close the sockets; to be called once all processes have ended."""
        if self._watcher.is_alive() and self._watcher is not threading.current_thread():
            self._watcher.join(SECONDS_TO_EXIT)
        for transport in self.transports:
            transport.close()

    def discard(self) -> None:
        self.end()
        self.close()

    def _kill(self) -> None:
        for popen in self._popens:
            popen.kill()
        self._reap(SECONDS_TO_EXIT)

    def _hung_up(self, timeout: float | None) -> list[int]:
        """The ranks that have hung up and are not in `lost`; waits up to `timeout` seconds for one."""
        poll = select.poll()
        ranks = {transport.fileno(): rank for rank, transport in enumerate(self.transports) if rank not in self.lost}
        for fd in ranks:
            poll.register(fd, 0)  # a hang-up is always reported
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
        """Collect the exit statuses of all processes that end within `timeout` seconds in total."""
        deadline = time.monotonic() + timeout
        for popen in self._popens:
            with suppress(subprocess.TimeoutExpired):
                popen.wait(max(0.0, deadline - time.monotonic()))


class ProcessWorkers:
    """Implements the `Workers` protocol."""

    host = "127.0.0.1"

    def __init__(self, size: int, *, command: Sequence[str] | None = None) -> None:
        self.size = size
        self.local_ranks = list(range(size))
        self.num_local = [size] * size
        self._processes = Processes(command or WORKER, size)
        self._transports = self._processes.transports
        self._ranks = {transport.fileno(): rank for rank, transport in enumerate(self._transports)}
        self._poll = select.poll()
        for fd in self._ranks:
            self._poll.register(fd, select.POLLIN)
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._closed = False
        self._discard = weakref.finalize(self, self._processes.discard)  # at exit, or if nobody calls close()

    @property
    def pids(self) -> list[int]:
        return self._processes.pids

    def send(self, frame: bytes, ranks: Iterable[int]) -> None:
        send_to_all([self._transports[rank] for rank in ranks], frame)

    def receive(self, timeout: float | None) -> Replies:
        for fd, rank in self._ranks.items():
            self._poll.modify(fd, self._transports[rank].events)
        ready = self._poll.poll(None if timeout is None else 1000 * timeout)
        replies: Replies = []
        for fd, _ in ready:
            rank = self._ranks[fd]
            try:
                replies += self._decoded(rank, self._transports[rank].receive())
            except EOFError:
                return replies + self.end(GRACE_SECONDS)
        return replies

    def _decoded(self, rank: int, frames: list[bytes]) -> Replies:
        return [(rank, self._decoder.decode(frame)) for frame in frames]

    def end(self, grace_seconds: float = 0.0) -> Replies:
        if self._closed:
            return []
        self._processes.end(grace_seconds)
        replies: Replies = []
        for rank, transport in enumerate(self._transports):
            replies += self._decoded(rank, transport.drain())
        replies += [(rank, Lost(how)) for rank, how in self._processes.lost.items()]
        self._close()
        return replies

    def close(self, farewell: bytes, timeout: float) -> None:
        if self._closed:
            return
        self._processes.expect_end()
        try:
            self.send(farewell, range(self.size))
            self._processes.join(timeout)
        finally:
            self._close()

    def _close(self) -> None:
        self._closed = True
        self._discard.detach()
        self._processes.close()
