"""The server as a Ray Serve application: `app`, its builder.

    serve run nanovllm.server.ray_app:app model=path/to/model replicas=2

Two deployments. `Ingress` runs the ASGI app: it reads requests, renders and tokenizes prompts, writes answers.
`Engine` runs an engine in a child process of each of its replicas; Ray Serve adds and removes those by load, and
starts anew what is lost. Between the two go the messages of engine/messages.py, as bytes. Ray Serve asks `PrefixRouter`
which replica gets a request.
"""

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing
from contextvars import Context
from dataclasses import fields
from typing import Any

import msgspec
from starlette.applications import Starlette

from nanovllm.config import Config
from nanovllm.engine.deltas import Delta
from nanovllm.errors import ConfigError, EngineClosedError, EngineError, RequestError
from nanovllm.remote.async_llm import describe_model
from nanovllm.remote.client import EngineClient
from nanovllm.remote.messages import AddRequest, EngineStats, EngineView, Event, Ready, Refused, StepDone
from nanovllm.remote.replicas import total, tries
from nanovllm.remote.routing import Router
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.app import build_app
from nanovllm.server.settings import ServerSettings
from nanovllm.utils.hub import DEFAULT_MODEL, resolve_model
from nanovllm.utils.logging import get_logger

try:
    from ray import serve
    from ray.exceptions import RayActorError
    from ray.serve.exceptions import RayServeException
    from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
    from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica
except ImportError as error:
    raise ImportError("nanovllm.server.ray_app needs Ray Serve: pip install 'nanovllm[ray]'") from error

logger = get_logger(__name__)

MAX_OPEN = 1 << 16  # HTTP requests of one ingress at once; the server itself answers 429 long before
# Where to listen and when to stop is Ray Serve's to say: its own config has `http_options` and timeouts for these.
NOT_OURS = {"host", "port", "ssl_certfile", "ssl_keyfile", "h11_max_incomplete_event_size", "shutdown_timeout"}
LOST = (RayActorError, RayServeException, EngineClosedError)  # the replica, all of them, or only its engine

_encode = msgspec.msgpack.Encoder().encode
_event = msgspec.msgpack.Decoder(Event)
_request = msgspec.msgpack.Decoder(AddRequest)
_ready = msgspec.msgpack.Decoder(Ready)
_stats = msgspec.msgpack.Decoder(EngineStats)
_view = msgspec.msgpack.Decoder(EngineView)


# --- the application --------------------------------------------------------------------------------------------------


class Arguments(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """What `args` of a Serve config file, or NAME=VALUE behind `serve run`, may set."""

    model: str | None = None
    engine: dict[str, Any] = {}  # options of the engine, as `LLM` takes them
    server: dict[str, Any] = {}  # options of the server, as `nanovllm serve` takes them
    replicas: int | None = None  # engines; for a number that follows the load see autoscaling_config of Ray Serve


def app(args: dict[str, Any]) -> serve.Application:
    """The application over `args` (see `Arguments`), for `serve run`, `serve deploy` and `serve.run(app({...}))`."""
    try:
        wanted = msgspec.convert(args, Arguments, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"args: {error}") from None
    config = Config.from_options(wanted.model, wanted.engine)
    read_settings(wanted.server)
    engines = serve.deployment(
        name="Engine",
        max_ongoing_requests=config.max_num_seqs,
        request_router_config={
            "request_router_class": f"{__name__}:{PrefixRouter.__name__}",
            "request_router_kwargs": {"block_size": config.kvcache_block_size},
        },
    )(EngineReplica)
    if wanted.replicas is not None:
        engines = engines.options(num_replicas=wanted.replicas)
    ingress = serve.deployment(name="Ingress", max_ongoing_requests=MAX_OPEN, ray_actor_options={"num_cpus": 0})(
        serve.ingress()(Ingress)
    )
    return ingress.bind(engines.bind(wanted.model, wanted.engine), wanted.model, wanted.engine, wanted.server)


def read_settings(given: dict[str, Any]) -> ServerSettings:
    known = {field.name for field in fields(ServerSettings)} - NOT_OURS
    for name in given:
        if name not in known:
            whose = "set by Ray Serve's own config" if name in NOT_OURS else f"unknown; known are {sorted(known)}"
            raise ConfigError(f"server option {name!r}: {whose}")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
    return ServerSettings(**values)


# --- the engine's side ------------------------------------------------------------------------------------------------


class EngineReplica:
    """One engine, in a child process, for as long as that lives."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, model: str | None, options: dict[str, Any]
    ) -> None:
        path = await asyncio.to_thread(resolve_model, model)
        self._client = await EngineClient.start(str(path), options)
        self._watch = asyncio.ensure_future(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        """Ray Serve starts a lost replica anew at once; one that only says it is ill, after some checks."""
        await self._client.ended()
        logger.error("the engine has ended, and with it this replica")
        os._exit(1)

    async def check_health(self) -> None:
        self._client.check_health()

    async def describe(self) -> bytes:
        return _encode(self._client.ready)

    async def stream(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """Events: what each step brings, or a refusal. Cancelling the call aborts the request."""
        try:
            async with aclosing(self._client.stream(asked := _request.decode(request))) as batches:
                async for batch in batches:
                    yield _encode(StepDone(batch))
        except RequestError as error:
            yield _encode(Refused(asked.request_id, str(error)))

    async def embed(self, token_ids: list[int], pooling: str) -> list[float] | str:
        """The embedding, or why there is none."""
        try:
            return await self._client.embed(token_ids, pooling)
        except RequestError as error:
            return str(error)

    async def stats(self) -> bytes:
        return _encode(await self._client.stats())

    async def view(self) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._client.view()) as views:
            async for view in views:
                yield _encode(view)


# --- the way between --------------------------------------------------------------------------------------------------


class PrefixRouter(RequestRouter):
    """`routing.Router` for Ray Serve: lives in each ingress, and knows what that one has sent where.

    Ray Serve pickles this class with all it refers to in this module; a decoder, for one, cannot be pickled.
    """

    def initialize_state(self, **settings: Any) -> None:
        self._router = Router(**settings)
        self._sent: dict[str, ReplicaID] = {}  # calls that the router counts as running

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        before = self._replica_id_set
        super().update_replicas(replicas)
        for gone in before - self._replica_id_set:
            self._router.remove(gone)
        for new in sorted(self._replica_id_set - before, key=str):
            self._router.remove(new)
            self._router.add(new)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._router.remove(replica_id)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The best one; then, in case it takes no more, all others."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all are full, ask again later
        chosen = self._route(pending_request)
        best = [replica for replica in candidate_replicas if replica.replica_id == chosen]
        return [best, [replica for replica in candidate_replicas if replica.replica_id != chosen]]

    def _route(self, pending: PendingRequest) -> ReplicaID:
        call = pending.metadata.internal_request_id
        self._end(call)  # it may be asked for again
        token_ids, salt = _prompt_of(pending)
        chosen = self._router.route(token_ids, salt=salt)
        assert isinstance(chosen, ReplicaID)
        self._sent[call] = chosen
        pending.future.add_done_callback(lambda future: self._end(call) if future.cancelled() else None)
        return chosen

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._end(internal_request_id)

    def _end(self, call: str) -> None:
        if call in self._sent:
            self._router.finished(self._sent.pop(call))


def _prompt_of(pending: PendingRequest) -> tuple[list[int], str | None]:
    if pending.metadata.call_method != "stream":
        return [], None
    request = msgspec.msgpack.decode(pending.args[0], type=AddRequest)
    return request.token_ids, request.cache_salt


class RemoteEngine:
    """The engines behind a Serve handle as the one that the server needs (see server/engine.py)."""

    def __init__(self, handle: DeploymentHandle, config: Config) -> None:
        self._handle = handle
        self.config = config
        self.max_num_seqs = config.max_num_seqs  # of one engine: how many there are changes
        self.model_name = config.model or DEFAULT_MODEL

    async def connect(self) -> None:
        """Returns when an engine is there."""
        path = await asyncio.to_thread(resolve_model, self.config.model)
        self.model_config, self.tokenizer = await asyncio.to_thread(describe_model, path, self.config)
        self.max_model_len = _ready.decode(await self._handle.describe.remote()).max_model_len

    async def submit(
        self,
        token_ids: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> AsyncGenerator[Delta, None]:
        """As `AsyncLLM.submit`; if the replica is lost before it has said anything, another one is asked."""
        request = _encode(AddRequest(request_id, token_ids, params, priority, cache_salt))
        begun = False
        for last_try in tries():
            try:
                async with aclosing(self._stream("stream", request)) as events:
                    async for event in events:
                        for delta in _deltas_of(_event.decode(event)):
                            begun = True
                            yield delta
                return
            except LOST as error:
                if begun or last_try:
                    raise EngineClosedError("the replica that had this request is lost") from error
                logger.warning("a replica was lost; request %s goes to another", request_id)

    async def view(self) -> AsyncGenerator[EngineView, None]:
        """Of one engine."""
        try:
            async with aclosing(self._stream("view")) as views:
                async for view in views:
                    yield _view.decode(view)
        except LOST as error:
            raise EngineClosedError("the replica that was looked at is lost") from error

    async def _stream(self, method: str, *args: bytes) -> AsyncGenerator[bytes, None]:
        """Leaving early cancels the call.

        In a context of its own: Ray Serve would give all calls that one HTTP request makes the same identity, and its
        router loses all but one of those that wait at the same time.
        """
        call = self._handle.options(method_name=method, stream=True)
        parts = Context().run(call.remote, *args)
        assert isinstance(parts, DeploymentResponseGenerator)
        ended = False
        try:
            async for part in parts:
                yield part
            ended = True
        finally:
            if not ended:
                parts.cancel()

    async def embed(self, token_ids: list[int], pooling: str) -> list[float]:
        for last_try in tries():
            try:
                found = await Context().run(self._handle.embed.remote, token_ids, pooling)
            except LOST as error:
                if last_try:
                    raise EngineClosedError("the replica that had this request is lost") from error
            else:
                if isinstance(found, str):
                    raise RequestError(found)
                return found
        raise AssertionError("the last try returns or raises")

    async def stats(self) -> EngineStats:
        return total([_stats.decode(found) for found in await self._ask_all("stats")])

    async def check_health(self) -> None:
        """EngineError unless at least one replica is well."""
        await self._ask_all("check_health")

    async def _ask_all(self, method: str) -> list[Any]:
        """The answers of all replicas that give one; EngineError if none does."""
        try:
            answers = await self._handle.broadcast(method).results_async(return_exceptions=True)
        except LOST as error:
            raise EngineClosedError("no replica is left") from error
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if len(errors) == len(answers):
            raise EngineError("no replica is well") from errors[0]
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def close(self) -> None:
        """The engines are Ray Serve's to end."""


def _deltas_of(event: Event) -> list[Delta]:
    if isinstance(event, Refused):
        raise RequestError(event.message)
    assert isinstance(event, StepDone)
    return event.deltas


# --- the clients' side ------------------------------------------------------------------------------------------------


class Ingress:
    """The HTTP API."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, engines: DeploymentHandle, model: str | None, options: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        engine = RemoteEngine(engines, Config.from_options(model, options))
        await engine.connect()
        self._asgi = build_app(engine, read_settings(settings))

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._asgi
