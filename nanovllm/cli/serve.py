"""`nanovllm serve`: serves a model over HTTP."""

import argparse
import dataclasses
import ipaddress
import os
from typing import TYPE_CHECKING, Any

from nanovllm.bench.arguments import positive_finite
from nanovllm.cli.console import note
from nanovllm.cli.options import add_engine_options, add_fields, chosen_fields, engine_options
from nanovllm.errors import ConfigError
from nanovllm.server.settings import ServerSettings

if TYPE_CHECKING:
    from nanovllm.cli.parser import Parser
    from nanovllm.remote.async_llm import AsyncLLM

SUMMARY = "serve a model over HTTP"
USAGE = "[options] [MODEL]"
DESCRIPTION = """\
Serve a model with the OpenAI API (/v1/chat/completions, /v1/completions, /v1/responses, /v1/embeddings) and the
Anthropic API (/v1/messages). A chat page is at /, a view of the engine at /engine, metrics at /metrics.

Ctrl-C or SIGTERM stops the server after open requests have finished; a second one stops it at once.
"""
EPILOG = """\
examples:
  nanovllm serve
  nanovllm serve path/to/Qwen3-0.6B --port 9000 --max-model-len 32768
  nanovllm serve path/to/Qwen3-8B --replicas 4
  NANOVLLM_API_KEY=secret nanovllm serve --host 0.0.0.0 --ssl-certfile cert.pem --ssl-keyfile key.pem
"""
KEY_VARIABLE = "NANOVLLM_API_KEY"  # unlike --api-key it does not show in the list of processes


def add_arguments(parser: "Parser") -> None:
    parser.add_argument("served", nargs="?", metavar="MODEL", help="The same as --model.")
    names = [field.name for field in dataclasses.fields(ServerSettings)]
    group = parser.add_argument_group("server options")
    add_fields(group, ServerSettings, names, {})
    group.add_argument(
        "--replicas",
        type=int,
        default=1,
        metavar="N",
        help="Number of engines that requests are distributed over. Each engine loads the whole model and, on GPUs, "
        "uses devices of its own. Default: 1.",
    )
    group.add_argument(
        "--stall-seconds",
        type=positive_finite,
        default=30.0,
        metavar="X",
        help="Seconds that a step may take before /health reports that the engine has stalled. Default: 30.",
    )
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    settings, engine = _settings(args), engine_options(args)
    if args.served is not None and engine.setdefault("model", args.served) != args.served:
        args.parser.error(f"two models: {args.served} and --model {engine['model']}; give one")
    if args.replicas < 1:
        args.parser.error(f"replicas={args.replicas}: must be at least 1")
    import asyncio

    from nanovllm.server.lifecycle import listen, serve, url_of
    from nanovllm.utils.open_files import allow_many_open_files

    allow_many_open_files()
    with listen(settings) as listener:
        _warn_if_open(settings)
        print(f"Listening on {url_of(listener, settings)}", flush=True)
        asyncio.run(serve(listener, settings, lambda: _load(engine, args.replicas, args.stall_seconds)))
    return 0


async def _load(options: dict[str, Any], replicas: int, stall_seconds: float) -> "AsyncLLM":
    engine = await _start(options, replicas, stall_seconds)
    times = f", {replicas} replicas" if replicas > 1 else ""
    note(f"Ready: {engine.model_name}{times}, {engine.max_model_len} tokens of context")
    return engine


async def _start(options: dict[str, Any], replicas: int, stall_seconds: float) -> "AsyncLLM":
    if replicas > 1:
        from nanovllm.remote.replicas import Replicas

        return await Replicas.start(count=replicas, stall_seconds=stall_seconds, **options)
    from nanovllm.remote.async_llm import AsyncLLM

    return await AsyncLLM.start(stall_seconds=stall_seconds, **options)


def _settings(args: argparse.Namespace) -> ServerSettings:
    parser: Parser = args.parser
    given: dict[str, Any] = chosen_fields(args, ServerSettings)
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    if "api_key" not in given and os.environ.get(KEY_VARIABLE):
        given["api_key"] = (os.environ[KEY_VARIABLE],)
    try:
        return ServerSettings(**given)
    except ConfigError as error:
        parser.error(str(error))


def _warn_if_open(settings: ServerSettings) -> None:
    try:
        local = ipaddress.ip_address(settings.host).is_loopback
    except ValueError:
        local = settings.host == "localhost"
    if not local and not settings.api_key:
        note(f"Warning: anyone who can reach {settings.host} can use this server; --api-key requires a key")
