"""Compiles the grammars of requests with structured outputs in threads, while the engine's loop goes on."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.errors import RequestError
from nanovllm.remote.messages import AddRequest

NUM_THREADS = 2  # grammars compiled at the same time; others wait


class CompilePool:
    """Holds requests until their grammars are compiled, which may take seconds.

    `when_done` is called in a thread of the pool whenever `finished` has a new request.
    """

    def __init__(self, when_done: Callable[[], None]) -> None:
        self._when_done = when_done
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="nanovllm-grammar")
        self._compiling: dict[str, AddRequest] = {}
        self._done: deque[AddRequest] = deque()

    def submit(self, engine: LLMEngine, request: AddRequest) -> None:
        self._compiling[request.request_id] = request
        self._threads.submit(self._compile, engine, request)

    def _compile(self, engine: LLMEngine, request: AddRequest) -> None:
        """Put the grammar, or the reason why it is refused, into the compiler's cache, where `add_request` finds it."""
        assert request.params.structured_outputs is not None
        try:
            if engine.text_params is not None:
                engine.text_params.compiler.compile(request.params.structured_outputs)
        except RequestError:
            pass  # add_request raises it again
        finally:
            self._done.append(request)
            self._when_done()

    def drop(self, request_ids: list[str]) -> None:
        """Forget requests that were aborted."""
        for name in request_ids:
            self._compiling.pop(name, None)

    def finished(self) -> list[AddRequest]:
        """Take the requests that can be added to the engine now."""
        found = []
        while self._done:
            request = self._done.popleft()
            if self._compiling.get(request.request_id) is request:  # else it was dropped
                found.append(self._compiling.pop(request.request_id))
        return found

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
