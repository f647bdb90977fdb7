"""Messages between two processes, or two threads, over a socket: each is a frame of four bytes of length and a msgpack
document.

The engine's service and its client, and an executor and its workers, all talk through a `Transport`. Workers that are
Ray actors get the same frames as the arguments and results of Ray calls.
"""

import os
import select
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import repeat

import msgspec

from nanovllm import errors

LENGTH_BYTES = 4
DONT_WAIT = int(socket.MSG_DONTWAIT)
# For one recv(). For a larger buffer the C library would map new memory at every call.
RECEIVE_BYTES = 1 << 16
MAX_RECEIVES = 16  # recv() calls per `receive`, so that a peer that sends without pause cannot hold up its caller

_encoder = msgspec.msgpack.Encoder()  # immutable: it holds settings only


def to_frame(message: object) -> bytes:
    frame = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, frame, LENGTH_BYTES)
    frame[:LENGTH_BYTES] = (len(frame) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return bytes(frame)


class FrameReader:
    """Cuts a stream of bytes, which arrives in pieces of any size, into frames."""

    def __init__(self) -> None:
        self.unread = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The frames that these bytes complete, without their lengths."""
        self.unread += data
        return self.take()

    def take(self) -> list[bytes]:
        """The complete frames among the unread bytes."""
        frames = []
        begin = 0
        while (start := begin + LENGTH_BYTES) <= len(self.unread):
            end = start + int.from_bytes(self.unread[begin:start], "big")
            if end > len(self.unread):
                break
            frames.append(bytes(self.unread[start:end]))
            begin = end
        del self.unread[:begin]
        return frames


class Transport:
    """One end of a socket. Only `receive` with a timeout and `flush` block.

    Ctrl-C (KeyboardInterrupt) at any moment leaves both streams intact: sent bytes are always removed from `unsent`,
    received bytes are always kept.

    With `wakeable`, `wake` may be called from another thread. All other methods belong to one thread.
    """

    def __init__(self, sock: socket.socket, *, wakeable: bool = False) -> None:
        sock.setblocking(True)  # the calls below that must not wait pass DONT_WAIT
        self.unsent = bytearray()  # what the socket has not taken yet; it goes out with later calls
        self._socket = sock
        self._frames = FrameReader()
        self._poll = select.poll()
        self._wake_reader, self._wake_writer = os.pipe() if wakeable else (-1, -1)
        if wakeable:
            os.set_blocking(self._wake_writer, False)
            self._poll.register(self._wake_reader, select.POLLIN)

    def fileno(self) -> int:
        """The socket's file descriptor, for a poll over several transports; -1 once closed."""
        return self._socket.fileno()

    @property
    def events(self) -> int:
        """What such a poll has to wait for: bytes to read and, if there are unsent ones, room to write."""
        return select.POLLIN | (select.POLLOUT if self.unsent else 0)

    def send(self, frames: bytes) -> None:
        """Queue frames and send what fits into the socket. If the peer is gone, `receive` reports it."""
        send_to_all([self], frames)

    def send_unsent(self) -> None:
        """Send what fits into the socket now."""
        with suppress(BlockingIOError, ConnectionError):
            while self.unsent:
                sent = map(self._socket.send, (self.unsent,), (DONT_WAIT,))
                _uninterrupted(map(self.unsent.__delitem__, map(slice, sent)))

    def flush(self) -> None:
        """Wait until everything is sent. EOFError if the peer is gone."""
        if not self.unsent:
            return
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while self.unsent:
            for _, events in poll.poll():
                if events & (select.POLLERR | select.POLLHUP):
                    raise EOFError
            self.send_unsent()

    def receive(self, timeout: float | None = 0) -> list[bytes]:
        """The frames that have arrived; waits up to `timeout` seconds (None: without limit) for more bytes or a `wake`.

        EOFError once the peer is gone and all its frames were returned.
        """
        flags = DONT_WAIT
        if timeout is None and self._wake_reader < 0 and not self.unsent:
            flags = 0  # there is nothing else to wait for: recv() itself waits, which saves a system call
        elif timeout != 0:
            self._wait(timeout)
        if self.unsent:
            self.send_unsent()
        ended = False
        try:
            num_bytes = self._read(flags)
            for _ in range(MAX_RECEIVES - 1):
                if num_bytes < RECEIVE_BYTES:
                    break
                num_bytes = self._read(DONT_WAIT)
        except BlockingIOError:
            pass
        except EOFError:
            ended = True
        frames = self._frames.take()
        if ended and not frames:
            raise EOFError
        return frames

    def drain(self) -> list[bytes]:
        """All frames that can be read without waiting; used when the peer has ended or is about to be closed."""
        with suppress(BlockingIOError, EOFError):
            while True:
                self._read(DONT_WAIT)
        return self._frames.take()

    def wake(self) -> None:
        """End the present or next wait of `receive`; from any thread."""
        with suppress(BlockingIOError):  # the pipe is full: a wake-up is already on its way
            os.write(self._wake_writer, b"!")

    def close(self) -> None:
        self._socket.close()
        if self._wake_reader >= 0:
            os.close(self._wake_reader)
            os.close(self._wake_writer)
            self._wake_reader = self._wake_writer = -1

    def _wait(self, timeout: float | None) -> None:
        self._poll.register(self._socket, self.events)
        ready = self._poll.poll(None if timeout is None else 1000 * timeout)
        if any(fd == self._wake_reader for fd, _ in ready):
            os.read(self._wake_reader, RECEIVE_BYTES)

    def _read(self, flags: int) -> int:
        """Call recv() once; returns the number of bytes. BlockingIOError if there are none and `flags` say not to wait,
        EOFError if the peer is gone."""
        unread = self._frames.unread
        before = len(unread)
        try:
            _uninterrupted(map(unread.extend, map(self._socket.recv, (RECEIVE_BYTES,), (flags,))))
        except ConnectionError as error:
            raise EOFError from error
        if len(unread) == before:
            raise EOFError
        return len(unread) - before


def send_to_all(transports: Sequence[Transport], frames: bytes) -> None:
    """Queue frames for all of these or, if Ctrl-C comes first, for none; then send what fits into the sockets."""
    _uninterrupted(map(bytearray.extend, [transport.unsent for transport in transports], repeat(frames)))
    for transport in transports:
        transport.send_unsent()


def _uninterrupted(calls: Iterable[None]) -> None:
    """Run lazy calls of C functions. Python raises KeyboardInterrupt between bytecode instructions, and between these
    calls there are none."""
    any(calls)  # runs all of them, since they return None; it takes half as long as a deque(calls, maxlen=0)


def raised_elsewhere(kind: str, message: str, traceback: str, *, where: str) -> errors.NanoError:
    """Rebuild an error that was raised in another process, named by `where`.

    It gets the class named `kind` if that is one of nanovllm.errors, else EngineError. Its cause has the traceback.
    """
    error_class = getattr(errors, kind, None)
    if isinstance(error_class, type) and issubclass(error_class, errors.NanoError):
        error = error_class(message)
    else:
        error = errors.EngineError(f"{kind}: {message}")
    error.__cause__ = errors.EngineError(f"in {where}:\n{traceback}")
    return error
