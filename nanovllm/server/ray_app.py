"""The server as a Ray Serve application. `app` builds it.

    serve run nanovllm.server.ray_app:app model=path/to/model replicas=2

There are two deployments. `Ingress` runs the ASGI app: it reads requests, tokenizes prompts and writes responses.
`Engine` runs an engine in a child process of each of its replicas. Ray Serve adds and removes replicas by load and
restarts lost ones. The two exchange the messages of remote/messages.py as bytes. Ray Serve calls `PrefixRouter` to
choose the replica for a request.
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
from nanovllm.utils.default_model import DEFAULT_MODEL
from nanovllm.utils.hub import resolve_model
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

MAX_OPEN_REQUESTS = 1 << 16  # HTTP requests per ingress; the server itself responds with 429 long before this
# Options that Ray Serve's own config sets, with `http_options` and its timeouts.
RAY_SERVE_OPTIONS = {
    "host",
    "port",
    "ssl_certfile",
    "ssl_keyfile",
    "h11_max_incomplete_event_size",
    "keep_alive_timeout",
    "shutdown_timeout",
}
REPLICA_LOST = (RayActorError, RayServeException, EngineClosedError)  # one replica, all replicas, or a replica's engine

_encode = msgspec.msgpack.Encoder().encode
_event = msgspec.msgpack.Decoder(Event)
_request = msgspec.msgpack.Decoder(AddRequest)
_ready = msgspec.msgpack.Decoder(Ready)
_stats = msgspec.msgpack.Decoder(EngineStats)
_view = msgspec.msgpack.Decoder(EngineView)


# --- the application --------------------------------------------------------------------------------------------------


class Arguments(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The options of the application: `args` in a Serve config file, or NAME=VALUE after `serve run`."""

    model: str | None = None
    engine: dict[str, Any] = {}  # options of the engine, as in `LLM(...)`
    server: dict[str, Any] = {}  # options of the server, as in `nanovllm serve`
    replicas: int | None = None  # number of engines; to follow the load, use Ray Serve's autoscaling_config instead


def app(args: dict[str, Any]) -> serve.Application:
    """Build the application from `args` (see `Arguments`); for `serve run`, `serve deploy` or `serve.run(app(...))`."""
    try:
        arguments = msgspec.convert(args, Arguments, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"args: {error}") from None
    config = Config.from_options(arguments.model, arguments.engine)
    read_settings(arguments.server)
    engines = serve.deployment(
        name="Engine",
        max_ongoing_requests=config.max_num_seqs,
        request_router_config={
            "request_router_class": f"{__name__}:{PrefixRouter.__name__}",
            "request_router_kwargs": {"block_size": config.kv_cache_block_size},
        },
    )(EngineReplica)
    if arguments.replicas is not None:
        engines = engines.options(num_replicas=arguments.replicas)
    ingress = serve.deployment(
        name="Ingress", max_ongoing_requests=MAX_OPEN_REQUESTS, ray_actor_options={"num_cpus": 0}
    )(serve.ingress()(Ingress))
    model, options = arguments.model, arguments.engine
    return ingress.bind(engines.bind(model, options), model, options, arguments.server)


def read_settings(options: dict[str, Any]) -> ServerSettings:
    """The server's settings, or a ConfigError for options that are unknown or belong to Ray Serve's config."""
    known = {field.name for field in fields(ServerSettings)} - RAY_SERVE_OPTIONS
    for name in options:
        if name not in known:
            in_ray_config = name in RAY_SERVE_OPTIONS
            problem = "set by Ray Serve's own config" if in_ray_config else f"unknown; known are {sorted(known)}"
            raise ConfigError(f"server option {name!r}: {problem}")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in options.items()}
    return ServerSettings(**values)


# --- the engine -------------------------------------------------------------------------------------------------------


class EngineReplica:
    """One engine in a child process. The replica ends when the engine's process ends."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, model: str | None, options: dict[str, Any]
    ) -> None:
        path = await asyncio.to_thread(resolve_model, model)
        self._client = await EngineClient.start(str(path), options)
        self._watch = asyncio.ensure_future(self._end_with_engine())

    async def _end_with_engine(self) -> None:
        """Exit when the engine has ended: Ray Serve restarts a lost replica sooner than an unhealthy one."""
        await self._client.ended()
        logger.error("the engine has ended; this replica exits")
        os._exit(1)

    async def check_health(self) -> None:
        self._client.check_health()

    async def describe(self) -> bytes:
        return _encode(self._client.ready)

    async def stream(self, request: bytes) -> AsyncGenerator[bytes, None]:
        """Yield encoded events: the deltas of each step, or a refusal. Cancelling the call aborts the request."""
        try:
            async with aclosing(self._client.stream(decoded := _request.decode(request))) as batches:
                async for batch in batches:
                    yield _encode(StepDone(batch))
        except RequestError as error:
            yield _encode(Refused(decoded.request_id, str(error)))

    async def embed(self, token_ids: list[int], pooling: str) -> list[float] | str:
        """The embedding, or the message of a RequestError."""
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


# --- between the ingress and the engines ------------------------------------------------------------------------------


class PrefixRouter(RequestRouter):
    """`routing.Router` for Ray Serve. Each ingress has one, which knows the requests that this ingress has sent.

    Ray Serve pickles this class with everything in this module that it refers to, so it must not refer to the decoders
    above, which cannot be pickled.
    """

    def initialize_state(self, **settings: Any) -> None:
        self._router = Router(**settings)
        self._sent: dict[str, ReplicaID] = {}  # replica by call, for the calls that the router counts as running

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
        """Groups of replicas in order of preference: the chosen one, then all others in case it is full."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # if all are full, try again later
        chosen = self._route(pending_request)
        best = [replica for replica in candidate_replicas if replica.replica_id == chosen]
        return [best, [replica for replica in candidate_replicas if replica.replica_id != chosen]]

    def _route(self, pending: PendingRequest) -> ReplicaID:
        call = pending.metadata.internal_request_id
        self._finish(call)  # the same call may be routed again
        token_ids, salt = _prompt_of(pending)
        chosen = self._router.route(token_ids, salt=salt)
        assert isinstance(chosen, ReplicaID)
        self._sent[call] = chosen
        pending.future.add_done_callback(lambda future: self._finish(call) if future.cancelled() else None)
        return chosen

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self._finish(internal_request_id)

    def _finish(self, call: str) -> None:
        if call in self._sent:
            self._router.finished(self._sent.pop(call))


def _prompt_of(pending: PendingRequest) -> tuple[list[int], str | None]:
    """(token ids, cache salt) of the prompt of a call; empty for calls without a prompt."""
    if pending.metadata.call_method != "stream":
        return [], None
    request = msgspec.msgpack.decode(pending.args[0], type=AddRequest)
    return request.token_ids, request.cache_salt


class RemoteEngine:
    """All engine replicas behind a Serve handle as one `Engine` (server/engine.py)."""

    def __init__(self, handle: DeploymentHandle, config: Config) -> None:
        self._handle = handle
        self.config = config
        self.max_num_seqs = config.max_num_seqs  # of one engine: the number of engines changes
        self.model_name = config.model or DEFAULT_MODEL

    async def connect(self) -> None:
        """Load the tokenizer and wait until an engine is ready."""
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
        """As `AsyncLLM.submit`. If the replica is lost before its first delta, the request is sent to another one."""
        request = _encode(AddRequest(request_id, token_ids, params, priority, cache_salt))
        started = False
        for last_try in tries():
            try:
                async with aclosing(self._stream("stream", request)) as events:
                    async for event in events:
                        for delta in _deltas_of(_event.decode(event)):
                            started = True
                            yield delta
                return
            except REPLICA_LOST as error:
                if started or last_try:
                    raise EngineClosedError("the replica that had this request is lost") from error
                logger.warning("a replica was lost; request %s is sent to another", request_id)

    async def view(self) -> AsyncGenerator[EngineView, None]:
        """Yield snapshots of the state of one of the engines."""
        try:
            async with aclosing(self._stream("view")) as views:
                async for view in views:
                    yield _view.decode(view)
        except REPLICA_LOST as error:
            raise EngineClosedError("the replica that sent its state is lost") from error

    async def _stream(self, method: str, *args: bytes) -> AsyncGenerator[bytes, None]:
        """Call a streaming method of a replica. Closing the generator early cancels the call.

        The call runs in an empty context. Otherwise Ray Serve gives all calls of one HTTP request the same id, and its
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
                result = await Context().run(self._handle.embed.remote, token_ids, pooling)
            except REPLICA_LOST as error:
                if last_try:
                    raise EngineClosedError("the replica that had this request is lost") from error
            else:
                if isinstance(result, str):
                    raise RequestError(result)
                return result
        raise AssertionError("the last try returns or raises")

    async def stats(self) -> EngineStats:
        return total([_stats.decode(stats) for stats in await self._call_all("stats")])

    async def check_health(self) -> None:
        """Raise an EngineError unless at least one replica is healthy."""
        await self._call_all("check_health")

    async def _call_all(self, method: str) -> list[Any]:
        """Call a method of all replicas. Returns the results of those that do not fail; EngineError if all fail."""
        try:
            results = await self._handle.broadcast(method).results_async(return_exceptions=True)
        except REPLICA_LOST as error:
            raise EngineClosedError("no replica is running") from error
        errors = [result for result in results if isinstance(result, BaseException)]
        if len(errors) == len(results):
            raise EngineError("no replica is healthy") from errors[0]
        return [result for result in results if not isinstance(result, BaseException)]

    async def close(self) -> None:
        """Does nothing: Ray Serve ends the engines."""


def _deltas_of(event: Event) -> list[Delta]:
    if isinstance(event, Refused):
        raise RequestError(event.message)
    assert isinstance(event, StepDone)
    return event.deltas


# --- the HTTP server --------------------------------------------------------------------------------------------------


class Ingress:
    """Runs the HTTP API as an ASGI app."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, engines: DeploymentHandle, model: str | None, options: dict[str, Any], settings: dict[str, Any]
    ) -> None:
        engine = RemoteEngine(engines, Config.from_options(model, options))
        await engine.connect()
        self._asgi = build_app(engine, read_settings(settings))

    def __serve_build_asgi_app__(self) -> Starlette:
        return self._asgi
