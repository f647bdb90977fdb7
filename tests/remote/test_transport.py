"""Frames over a socket, as the engine's service and client and the executor's workers use them."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanovllm.executor.messages import Launch, Wait
from nanovllm.executor.messages import Reply as WorkerReply
from nanovllm.plan import StepPlan
from nanovllm.remote.messages import AddRequest, Command, Event, Refused
from nanovllm.remote.transport import RECEIVE_BYTES, FrameReader, Transport, send_to_all, to_frame
from nanovllm.sampling_params import SamplingParams, StructuredOutputs

LARGE = b"x" * 4_000_000  # more than a socket holds


@pytest.fixture
def ends() -> Iterator[tuple[Transport, Transport]]:
    one, other = socket.socketpair()
    first, second = Transport(one, wakeable=True), Transport(other)
    yield first, second
    first.close()
    second.close()


def decoded(frames: list[bytes]) -> list[object]:
    return [msgspec.msgpack.decode(frame) for frame in frames]


# --- frames -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=300)), st.lists(st.integers(1, 200), min_size=1))
def test_frames_survive_any_cutting(texts: list[bytes], sizes: list[int]) -> None:
    messages = [Refused("x", text.hex()) for text in texts]
    stream = b"".join(map(to_frame, messages))
    reader, found = FrameReader(), []
    number = 0
    while stream:
        part, stream = stream[: sizes[number % len(sizes)]], stream[sizes[number % len(sizes)] :]
        found += [msgspec.msgpack.decode(frame, type=Event) for frame in reader.feed(part)]
        number += 1
    assert found == messages


def test_sampling_params_arrive_as_they_were_sent() -> None:
    params = SamplingParams(
        n=2,
        temperature=0.5,
        seed=2**64 - 1,
        stop=["a", "b"],
        stop_token_ids=[7],
        logit_bias={3: -1.5},
        allowed_token_ids=[3, 4],
        bad_words=["x"],
        max_tokens=None,
        logprobs=0,
        structured_outputs=StructuredOutputs(json={"type": "object"}),
    )
    (frame,) = FrameReader().feed(to_frame(AddRequest("r", [1, 2], params, -3, "salt")))
    assert msgspec.msgpack.decode(frame, type=Command) == AddRequest("r", [1, 2], params, -3, "salt")


def test_equal_commands_of_an_executor_are_equal_bytes() -> None:
    plan = StepPlan(decode_rows=(300, 400))
    assert to_frame(Launch(plan)) == to_frame(Launch(StepPlan(decode_rows=(300, 400))))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(to_frame(Wait(1, 0))[4:], type=WorkerReply)


# --- sending ----------------------------------------------------------------------------------------------------------


def test_sending_does_not_wait_for_a_reader_and_a_flush_does(ends: tuple[Transport, Transport]) -> None:
    first, second = ends
    for number in range(10):
        first.send(to_frame([number, LARGE]))
    assert first.unsent
    flusher = threading.Thread(target=first.flush)
    flusher.start()
    found: list[object] = []
    while len(found) < 10:
        found += decoded(second.receive(None))
    flusher.join()
    assert found == [[number, LARGE] for number in range(10)] and not first.unsent


def test_what_was_left_unsent_goes_out_with_a_later_receive(ends: tuple[Transport, Transport]) -> None:
    first, second = ends
    first.send(to_frame(LARGE))
    left = len(first.unsent)
    second.receive(None)
    first.receive()
    assert len(first.unsent) < left


def test_a_command_goes_to_all_workers() -> None:
    pairs = [tuple(map(Transport, socket.socketpair())) for _ in range(3)]
    send_to_all([ours for ours, _ in pairs[1:]], to_frame("x"))
    assert [decoded(theirs.receive()) for _, theirs in pairs] == [[], ["x"], ["x"]]
    for pair in pairs:
        for transport in pair:
            transport.close()


# --- receiving --------------------------------------------------------------------------------------------------------


def test_all_that_has_arrived_is_received_together(ends: tuple[Transport, Transport]) -> None:
    first, second = ends
    messages = [bytes([number]) * (RECEIVE_BYTES // 4) for number in range(8)]
    for message in messages:
        second.send(to_frame(message))
    assert not second.unsent
    assert decoded(first.receive()) == messages
    assert first.receive() == []


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_waiting_ends_after_the_timeout(ends: tuple[Transport, Transport], timeout: float) -> None:
    begin = time.monotonic()
    assert ends[0].receive(timeout) == []
    assert timeout <= time.monotonic() - begin < timeout + 5


def test_another_thread_ends_the_wait(ends: tuple[Transport, Transport]) -> None:
    first, second = ends
    for _ in range(100_000):  # more than the pipe holds
        first.wake()
    assert first.receive(None) == [], "the next wait"
    timer = threading.Timer(0.05, first.wake)
    timer.start()
    assert first.receive(None) == [], "the present wait"
    timer.join()
    second.send(to_frame("after"))
    assert decoded(first.receive(None)) == ["after"]


# --- the end of the peer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10, RECEIVE_BYTES - 9])  # small, and one that fills a whole recv() call
def test_the_last_frames_come_before_the_end(ends: tuple[Transport, Transport], size: int) -> None:
    first, second = ends
    second.send(to_frame(b"x" * size))
    second.close()
    assert decoded(first.receive(None)) == [b"x" * size]
    for timeout in (0, None):
        with pytest.raises(EOFError):
            first.receive(timeout)


@pytest.mark.parametrize("unread", [False, True])
def test_sending_to_nobody_is_reported_by_receive_and_flush(ends: tuple[Transport, Transport], unread: bool) -> None:
    first, second = ends
    if unread:  # then the kernel reports a reset connection
        first.send(to_frame("never read"))
    second.close()
    first.send(to_frame("x"))
    with pytest.raises(EOFError):
        first.flush()
    with pytest.raises(EOFError):
        first.receive()


def test_a_flush_ends_when_the_peer_does(ends: tuple[Transport, Transport]) -> None:
    first, second = ends
    first.send(to_frame(LARGE))
    assert first.unsent
    timer = threading.Timer(0.05, second.close)
    timer.start()
    with pytest.raises(EOFError):
        first.flush()
    timer.join()


def test_what_a_worker_said_before_its_end_is_drained(ends: tuple[Transport, Transport]) -> None:
    first, second = ends
    for number in range(4):
        second.send(to_frame([number, "x" * (RECEIVE_BYTES // 3)]))
    second.send(to_frame("cut")[:-1])
    second.close()
    assert [message[0] for message in decoded(first.drain())] == [0, 1, 2, 3]
    assert first.drain() == []


def test_a_closed_transport_leaves_no_file_descriptors() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = socket.socketpair()
    transport = Transport(ours, wakeable=True)
    theirs.close()
    transport.close()
    transport.close()
    assert transport.fileno() == -1 and len(os.listdir("/proc/self/fd")) == before


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def test_an_interrupt_at_any_moment_leaves_the_stream_whole(ends: tuple[Transport, Transport]) -> None:
    """A sender that is interrupted again and again sends each frame wholly or not at all, and in order."""
    first, second = ends
    generator = random.Random(0)
    found: list[int] = []

    def read() -> None:
        while not found or found[-1] >= 0:
            found.extend(message[0] for message in decoded(second.receive(None)))

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    usual = signal.signal(signal.SIGALRM, interrupt)
    reader = threading.Thread(target=read)
    reader.start()
    try:
        number = 0
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, generator.uniform(0.00005, 0.001))
                while True:
                    number += 1
                    first.send(to_frame([number, "x" * generator.randrange(2000)]))
                    first.flush()
            except KeyboardInterrupt:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
        first.send(to_frame([-1]))
        first.flush()
        reader.join()
    assert found[-1] == -1
    assert found[:-1] == sorted(set(found[:-1])) and len(found) > 200
