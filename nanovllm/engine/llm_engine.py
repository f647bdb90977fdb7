"""Requests in, outputs out: tokenizes prompts, queues requests, runs steps and makes text."""

import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from nanovllm.config import Config
from nanovllm.engine.core import EngineCore
from nanovllm.engine.intake import Intake
from nanovllm.engine.request import Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import EngineClosedError, EngineError, RequestError
from nanovllm.models.registry import describe
from nanovllm.outputs import RequestOutput
from nanovllm.plan import StepPlan
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import Prompt, read_prompt
from nanovllm.utils.collector import collector_paused
from nanovllm.utils.hub import resolve_model

if TYPE_CHECKING:
    from nanovllm.engine.growing_text import GrowingText
    from nanovllm.engine.proposer import Proposer
    from nanovllm.engine.text_params import TextParams


class LLMEngine:
    """An engine in this process: call `add_request`, then `step` until `is_finished`."""

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        proposer: "Proposer | None" = None,
        serves: bool = False,
        **options: Any,
    ) -> None:
        """`options` are those of `Config`. `proposer` guesses next tokens, several of which a step then verifies.
        `serves`: clients read tokens as they come, so the option target_itl_ms has a default."""
        self._closed: str | None = None
        self._cause: Exception | None = None  # the failure that closed the engine, if one did
        self.config = Config.from_options(None if model is None else str(model), options)
        path = resolve_model(self.config.model)
        if self.config.device != "cpu" or self.config.load_format != "dummy":
            from nanovllm.executor.head_start import head_start

            head_start(self.config, path)
        description = describe(path)
        if description.config.keeps_row_state:
            from nanovllm.engine.row_state_options import with_row_states

            self.config = with_row_states(self.config, description.config, options, proposer)
        self.model_config = description.config
        self.max_model_len = min(self.config.max_model_len, self.model_config.max_position)
        self.eos_token_ids = frozenset(self.model_config.eos_token_ids)
        self.text_params: TextParams | None = None
        if not self.config.skip_tokenizer_init:
            from nanovllm.engine.load_tokenizer import load_text_params

            self.text_params = load_text_params(path, description, self.config.tokenizer)
        self.tokenizer = None if self.text_params is None else self.text_params.tokenizer
        self._core = self._build_core(path, proposer, serves=serves)
        self._requests: dict[str, Request] = {}
        self._of_seq: dict[Sequence, Request] = {}
        self._watched: dict[Sequence, GrowingText] = {}  # texts that are read after every step
        self._undelivered: dict[str, RequestOutput] = {}  # outputs of other callers' requests, for their next step()
        self.intake = Intake(
            vocab_size=self.model_config.vocab_size,
            eos_token_ids=self.eos_token_ids,
            text_params=self.text_params,
            max_num_tokens=self.max_model_len,
            num_cache_tokens=self.scheduler.config.max_cached_tokens,
            seeds=Random(self.config.seed),
        )
        self._num_added = 0

    def _build_core(self, path: Path, proposer: "Proposer | None", *, serves: bool) -> EngineCore:
        with collector_paused():
            from nanovllm.executor.make import make_executor

            executor = make_executor(self.config, self.model_config, path, max_model_len=self.max_model_len)
        self.startup_seconds = executor.startup_seconds
        if executor.runs_beside_host:
            from nanovllm.utils.frozen_objects import freeze_objects

            freeze_objects()  # a collection would take as long as several steps
        overlap = executor.runs_beside_host if self.config.overlap is None else self.config.overlap
        layout = self.config.cache_layout(windows=self.model_config.windows, max_model_len=self.max_model_len)
        sizes = self.config.scheduler_config(
            max_model_len=self.max_model_len,
            groups=layout.groups(executor.num_blocks),
            keeps_row_state=self.model_config.keeps_row_state,
        )
        pacer = None
        if serves or self.config.target_itl_ms:
            from nanovllm.engine.pacer import make_pacer

            pacer = make_pacer(self.config.target_itl_ms, serves=serves)
        return EngineCore(Scheduler(sizes, proposer=proposer, pacer=pacer), executor, depth=int(overlap))

    # --- requests -----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        stream: bool = False,
    ) -> str:
        """Queue a request and return its id. `stream=True` makes `step` report it whenever it has grown."""
        self.check_open()
        params = SamplingParams() if sampling_params is None else sampling_params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params={params!r}: must be a SamplingParams")
        request_id, arrival = self.new_id(request_id)
        text, token_ids, salt = read_prompt(prompt, self.tokenizer)
        self.intake.check_tokens(token_ids, params)
        seqs = self.intake.make_seqs(request_id, token_ids, params, arrival=arrival, priority=priority, cache_salt=salt)
        self.queue(Request(request_id, text, seqs, params, self.tokenizer, stream=stream))
        return request_id

    def new_id(self, request_id: str | None) -> tuple[str, int]:
        """The id of a new request, made if it is None, and how many requests came before it."""
        arrival = self._num_added
        self._num_added += 1
        request_id = request_id or str(arrival)
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r}: a request of this name is still running")
        return request_id, arrival

    def queue(self, request: Request) -> None:
        """Queue a request that was checked, or refuse one that could never run."""
        scheduler = self._core.scheduler
        scheduler.add(request.seqs[0])
        self._requests[request.request_id] = request
        for completion in request.completions:
            self._of_seq[completion.seq] = request
            if request.stream or request.params.stop:
                from nanovllm.engine.growing_text import GrowingText

                completion.growing = GrowingText(completion.seq, completion.tokenizer, finish=scheduler.finish)
                self._watched[completion.seq] = completion.growing

    def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests without an output. Unknown and finished ones are ignored."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            request = self._requests.get(name)
            if request is not None:
                for seq in request.seqs:
                    self._core.scheduler.abort(seq)
                self._forget(request)
            self._undelivered.pop(name, None)

    def is_finished(self) -> bool:
        return not self._requests and not self._undelivered

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    # --- the loop -----------------------------------------------------------------------------------------------------

    def step(self, names: Collection[str] | None = None) -> list[RequestOutput]:
        """Run one step; returns the outputs of requests that ended, and of streamed ones that grew. With `names`, only
        of these requests; the outputs of others wait for their own caller."""
        waited = {name: self._undelivered.pop(name) for name in [*self._undelivered] if names is None or name in names}
        if waited and names is not None:
            return list(waited.values())
        changed = self.step_requests()
        new = {each.request_id: each.output(self.eos_token_ids) for each in changed if each.finished or each.stream}
        if names is None:
            return list((waited | new).values())
        self._undelivered |= {name: output for name, output in new.items() if name not in names}
        return [output for name, output in new.items() if name in names]

    def step_requests(self) -> list[Request]:
        """Run one step; returns the requests that ended, and those with streaming or stop strings that grew."""
        self.check_open()
        began = time.monotonic()
        try:
            ended = self._core.step()
        except KeyboardInterrupt:
            self._start_over()
            raise
        except Exception as error:
            self._fail(error)
            raise EngineError(f"a step failed and the engine is closed: {_message(error)}") from error
        self._stamp(ended, began)
        return self._changed(ended)

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do; also true while the step of an aborted request still runs."""
        return self._core.has_work

    def idle_work(self) -> Iterator[None]:
        """Work that makes later steps quicker, one piece after the other."""
        return self._core.executor.idle_work()

    @property
    def overlaps(self) -> bool:
        """Whether the next step is launched before the results of the last one are read."""
        return self._core.depth > 0

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for reading."""
        return self._core.scheduler

    @property
    def last_plan(self) -> StepPlan | None:
        """The plan whose result the last `step` took in."""
        return self._core.last_plan

    def _stamp(self, ended: list[Sequence], began: float) -> None:
        """Record when requests first ran and had their first token; only steps with prompt chunks change that."""
        plan = self._core.last_plan
        if plan is None or not plan.row_steps:
            return
        now = time.monotonic()
        for seq in self._core.scheduler.running + ended:
            metrics = self._of_seq[seq].metrics
            if metrics.first_scheduled_time is None:
                metrics.first_scheduled_time = began
            if metrics.first_token_time is None and seq.num_completion_tokens:
                metrics.first_token_time = now

    def _changed(self, ended: list[Sequence]) -> list[Request]:
        grown = [seq for seq, text in self._watched.items() if text.read_new_tokens()]
        changed = list(dict.fromkeys([self._of_seq[seq] for seq in grown + ended]))
        now = time.monotonic()
        for request in changed:
            if request.finished:
                request.metrics.finished_time = now
                self._forget(request)
        return [request for request in changed if request.seqs[0].pooling is None]

    # --- open and close -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Free all memory. Running requests are dropped. Closing twice is allowed."""
        if self._closed is None:
            self._shut("the engine was closed")

    def _shut(self, reason: str) -> None:
        self._closed = reason
        self._drop_requests()
        try:
            self._core.executor.close()
        finally:
            if self.text_params is not None:
                self.text_params.close()
            if self._core.executor.runs_beside_host:
                from nanovllm.utils.frozen_objects import unfreeze_objects

                unfreeze_objects()
            del self._core

    def check_health(self) -> None:
        """Raise EngineError if the engine cannot continue."""
        self.check_open()
        try:
            self._core.executor.check()
        except EngineError as error:
            self._fail(error)
            raise

    def _fail(self, error: Exception) -> None:
        self._cause = error
        try:
            self._shut(f"the engine was closed by an earlier failure: {_message(error)}")
        except Exception as closing:  # a GPU that has failed cannot free memory either; the first error is the cause
            error.add_note(f"Closing the engine failed too: {_message(closing)}")

    def _start_over(self) -> None:
        """Drop all requests and make a new scheduler: a step was interrupted, so host and device may differ."""
        self._drop_requests()
        old = self._core
        scheduler = Scheduler(old.scheduler.config, proposer=old.scheduler.proposer, pacer=old.scheduler.pacer)
        self._core = EngineCore(scheduler, old.executor, depth=old.depth)

    def _drop_requests(self) -> None:
        for requests in (self._requests, self._of_seq, self._watched, self._undelivered):
            requests.clear()

    def check_open(self) -> None:
        """Raise EngineClosedError if the engine was closed."""
        if self._closed is not None:
            raise EngineClosedError(self._closed) from self._cause

    def reset_prefix_cache(self) -> None:
        self.check_open()
        self._core.scheduler.block_manager.reset_prefix_cache()

    def _forget(self, request: Request) -> None:
        self._requests.pop(request.request_id, None)
        for seq in request.seqs:
            self._of_seq.pop(seq, None)
            self._watched.pop(seq, None)


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"
