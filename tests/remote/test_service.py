"""The engine's end of the socket: one message per step, and what ends it."""

import socket
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nanovllm.engine.deltas import Delta
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.remote.messages import (
    BLOCK_CACHED,
    BLOCK_FREE,
    BLOCK_IN_USE,
    BLOCK_SHARED,
    Abort,
    Aborted,
    AddRequest,
    Answer,
    Command,
    Embed,
    Event,
    Failed,
    GetStats,
    Ping,
    Pong,
    Ready,
    Refused,
    Shutdown,
    Start,
    StepDone,
    View,
    Watch,
)
from nanovllm.remote.service import serve
from nanovllm.remote.transport import FrameReader, to_frame
from nanovllm.remote.views import block_states
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.structured.compiler import Compiler
from tests.helpers import TEXT_MODEL, greedy_params, model_dir, open_llm, prompt_of, scheduler_of

OPTIONS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "kv_cache_block_size": 16,
    "num_kv_cache_blocks": 16,
}


class Peer:
    """The other end of the socket, and the thread that serves."""

    def __init__(self, **options: Any) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(60)
        self._frames = FrameReader()
        self._events: list[Event] = []
        self.status: int | None = None
        self._thread = threading.Thread(target=self._serve, args=(theirs,))
        self._thread.start()
        self.send(Start(str(model_dir(TEXT_MODEL)), OPTIONS | options))

    def _serve(self, theirs: socket.socket) -> None:
        self.status = serve(theirs)

    def send(self, *commands: Command) -> None:
        """Send all in one write, so that the engine receives them together."""
        self._socket.sendall(b"".join(map(to_frame, commands)))

    def receive(self) -> Event:
        while not self._events:
            data = self._socket.recv(65536)
            if not data:
                raise EOFError
            self._events += [msgspec.msgpack.decode(frame, type=Event) for frame in self._frames.feed(data)]
        return self._events.pop(0)

    def receive_until(self, kind: type) -> list[Event]:
        events = [self.receive()]
        while not isinstance(events[-1], kind):
            events.append(self.receive())
        return events

    def join(self) -> int | None:
        self._thread.join(60)
        return self.status

    def close(self) -> None:
        self._socket.close()
        self.join()


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    assert isinstance(peer.receive(), Ready)
    yield peer
    peer.close()


def request(name: str, length: int = 5, max_tokens: int = 4, **settings: Any) -> AddRequest:
    return AddRequest(name, prompt_of(length, seed=len(name)), greedy_params(max_tokens, **settings), 0, None)


def deltas_of(events: list[Event]) -> list[Delta]:
    return [delta for event in events if isinstance(event, StepDone) for delta in event.deltas]


def stats_of(peer: Peer) -> Any:
    peer.send(GetStats(1))
    (*_, answer) = peer.receive_until(Answer)
    assert isinstance(answer, Answer)
    return answer.stats


# --- the step loop ----------------------------------------------------------------------------------------------------


def test_one_message_a_step_for_all_requests(peer: Peer) -> None:
    peer.send(request("a"), request("bb"), request("ccc"), GetStats(0))
    answer = peer.receive()
    assert isinstance(answer, Answer), "commands are taken before the next step"
    steps = [peer.receive() for _ in range(4)]
    for step in steps:
        assert isinstance(step, StepDone)
        assert [delta.request_id for delta in step.deltas] == ["a", "bb", "ccc"]
        assert all(len(delta.token_ids) == 1 for delta in step.deltas)
    assert {delta.finish_reason for delta in deltas_of(steps)} == {None, "length"}
    peer.send(Ping())
    assert isinstance(peer.receive(), Pong), "no step is made for nobody"


def test_idle_work_is_done_while_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    found_work: list[bool] = []
    began, ended = threading.Event(), threading.Event()

    def pieces(engine: LLMEngine) -> Iterator[None]:
        while not ended.is_set():
            found_work.append(engine.has_work)
            began.set()
            yield

    monkeypatch.setattr(LLMEngine, "idle_work", pieces)
    peer = Peer()
    assert isinstance(peer.receive(), Ready)
    assert began.wait(60)
    peer.send(request("a"))  # comes between two pieces
    assert len(deltas_of([peer.receive() for _ in range(4)])) == 4
    ended.set()
    peer.send(Ping())
    assert isinstance(peer.receive(), Pong)
    peer.close()
    assert not any(found_work)


def test_the_first_delta_of_a_request_tells_how_long_it_waited() -> None:
    peer = Peer(max_num_seqs=1)
    peer.receive()
    peer.send(request("a"), request("bb", n=1), GetStats(0))
    events = [event for event in (peer.receive() for _ in range(1 + 8)) if isinstance(event, StepDone)]
    told = {name: [d.queue_seconds for d in deltas_of(events) if d.request_id == name] for name in ("a", "bb")}
    assert [seconds is None for seconds in told["a"]] == [False, True, True, True]
    assert 0 <= told["a"][0] < told["bb"][0], "which could not begin before the other had ended"
    peer.close()


def test_a_step_without_tokens_is_a_sign_of_life_too() -> None:
    peer = Peer(max_num_batched_tokens=8)
    peer.receive()
    peer.send(request("long", length=40, max_tokens=1))
    steps = [peer.receive() for _ in range(5)]
    assert [len(deltas_of([step])) for step in steps] == [0, 0, 0, 0, 1]
    peer.close()


def test_a_refusal_is_about_one_request(peer: Peer) -> None:
    peer.send(request("good"), request("bad", length=300), request("good"))
    first, second = peer.receive(), peer.receive()
    assert isinstance(first, Refused) and first.request_id == "bad" and "max_model_len" in first.message
    assert isinstance(second, Refused) and second.request_id == "good" and "still running" in second.message
    assert deltas_of([peer.receive() for _ in range(4)])[-1].finish_reason == "length"


@pytest.mark.parametrize("overlap", [False, True])
def test_an_abort_is_confirmed_and_frees_the_blocks(overlap: bool) -> None:
    peer = Peer(overlap=overlap)
    peer.receive()
    peer.send(request("a", max_tokens=200))
    peer.receive()
    peer.send(Abort(["a", "unknown"]))
    peer.receive_until(Aborted)
    stats = stats_of(peer)
    assert (stats.num_running, stats.num_free_blocks + stats.num_cached_blocks) == (0, stats.num_blocks)
    peer.send(request("a", max_tokens=2))
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        deltas += deltas_of([peer.receive()])
    assert sum(len(delta.token_ids) for delta in deltas) == 2
    peer.close()


def test_an_embedding_waits_for_blocks(peer: Peer) -> None:
    peer.send(request("a", length=100, max_tokens=60), Embed(7, prompt_of(150), "mean"), Embed(8, [5], "last"))
    (*before, answer) = peer.receive_until(Answer)
    assert isinstance(answer, Answer) and answer.call == 7 and len(answer.embedding or ()) == 96
    assert deltas_of(before)[-1].finish_reason == "length"
    answer = peer.receive()
    assert isinstance(answer, Answer) and answer.call == 8
    peer.send(Embed(9, prompt_of(257), "mean"))
    answer = peer.receive()
    assert isinstance(answer, Answer) and "257 tokens" in (answer.refusal or "")


def test_a_grammar_is_compiled_beside_the_loop(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    compiling, go_on = threading.Event(), threading.Event()
    compile_now = Compiler.compile

    def compile_slowly(self: Compiler, spec: StructuredOutputs) -> Any:
        if threading.current_thread().name.startswith("nanovllm-grammar"):
            compiling.set()
            assert go_on.wait(60)
        return compile_now(self, spec)

    monkeypatch.setattr(Compiler, "compile", compile_slowly)
    choice = StructuredOutputs(choice=["apples", "eggs"])
    slow = request("slow", max_tokens=30, structured_outputs=choice)
    peer.send(slow, request("dropped", structured_outputs=choice))
    assert compiling.wait(60)
    peer.send(request("quick"), Abort(["dropped"]))
    events = [*peer.receive_until(Aborted), *(peer.receive() for _ in range(4))]
    assert {delta.request_id for delta in deltas_of(events)} == {"quick"}
    go_on.set()
    deltas: list[Delta] = []
    while not deltas or deltas[-1].finish_reason is None:
        deltas += deltas_of([peer.receive()])
    assert {delta.request_id for delta in deltas} == {"slow"}
    assert "".join(delta.text for delta in deltas) in ("apples", "eggs")
    peer.send(request("bad", structured_outputs=StructuredOutputs(regex="(")))
    event = peer.receive()
    assert isinstance(event, Refused) and "regex" in event.message


def test_views_come_only_while_watched(peer: Peer) -> None:
    peer.send(request("a", max_tokens=3), GetStats(0))
    assert not [event for event in [peer.receive() for _ in range(4)] if isinstance(event, View)]
    peer.send(Watch(on=True))
    assert isinstance(peer.receive(), View), "the first one at once"
    peer.send(request("b", max_tokens=3))
    steps = []
    while len(steps) < 3:
        (*_, event) = peer.receive_until(View)
        assert isinstance(event, View)
        steps += [(step.num_prefill_tokens, step.num_decodes) for step in event.view.steps]
    assert steps == [(5, 0), (0, 1), (0, 1)]
    peer.send(Watch(on=False), request("c", max_tokens=3))
    assert [type(peer.receive()) for _ in range(3)] == [StepDone] * 3
    peer.send(Ping())
    assert isinstance(peer.receive(), Pong)


def test_block_states() -> None:
    with open_llm(TEXT_MODEL, num_kv_cache_blocks=8) as llm:
        assert block_states(scheduler_of(llm)) == (bytes(8), [0] * 8)
        llm.add_request(prompt_of(20), greedy_params(8, n=2))
        llm.step()
        llm.step()
        states, owners = block_states(scheduler_of(llm))
        counts = [states.count(state) for state in (BLOCK_FREE, BLOCK_CACHED, BLOCK_IN_USE, BLOCK_SHARED)]
        assert counts == [5, 0, 2, 1]
        assert sorted(owners) == [0, 0, 0, 0, 0, 1, 1, 2]
        while not llm.is_finished():
            llm.step()
        states, owners = block_states(scheduler_of(llm))
        assert states.count(BLOCK_CACHED) == 1 and not any(owners)


# --- shutdown and failures --------------------------------------------------------------------------------------------


def test_shutdown(peer: Peer) -> None:
    peer.send(request("a", max_tokens=200), Shutdown())
    with pytest.raises(EOFError):
        while True:
            peer.receive()
    assert peer.join() == 0


def test_it_ends_when_nobody_listens(peer: Peer) -> None:
    peer.send(request("a", max_tokens=200))
    peer.receive()
    peer.close()
    assert peer.status == 0


def test_a_failed_step_is_told_with_its_traceback(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: LLMEngine) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(LLMEngine, "step_requests", fail)
    peer.send(request("a"))
    event = peer.receive()
    assert isinstance(event, Failed)
    assert (event.kind, event.message) == ("ZeroDivisionError", "a bug") and "in fail" in event.traceback
    assert peer.join() == 1


def test_an_engine_that_cannot_start_says_why() -> None:
    peer = Peer(num_kv_cache_blocks=0)
    event = peer.receive()
    assert isinstance(event, Failed) and event.kind == "ConfigError" and "num_kv_cache_blocks" in event.message
    assert peer.join() == 1
    peer.close()


def test_start_takes_earlier_spellings_of_options() -> None:
    peer = Peer(num_kvcache_blocks=OPTIONS["num_kv_cache_blocks"], kvcache_block_size=OPTIONS["kv_cache_block_size"])
    assert isinstance(peer.receive(), Ready)
    peer.close()
    peer = Peer(num_kvcache_blocks=17)
    event = peer.receive()
    assert isinstance(event, Failed) and event.kind == "ConfigError" and "two spellings" in event.message
    assert peer.join() == 1
    peer.close()
