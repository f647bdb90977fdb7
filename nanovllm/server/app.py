"""`build_app(engine)`: the server as an ASGI app, for any ASGI host."""

from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from nanovllm.server.chat import chat
from nanovllm.server.completions import complete
from nanovllm.server.conversation import check_settings
from nanovllm.server.embeddings import embed
from nanovllm.server.engine import Engine
from nanovllm.server.errors import ApiError, as_api_error
from nanovllm.server.http import JsonPost, JsonResponse
from nanovllm.server.info import Info
from nanovllm.server.messages import ANTHROPIC_ERRORS, count_message_tokens, create_message
from nanovllm.server.middleware import ApiKeys, RequestIds
from nanovllm.server.openapi import document
from nanovllm.server.pages import PAGES, STATIC, page_routes
from nanovllm.server.responses import create_response
from nanovllm.server.service import Service
from nanovllm.server.settings import ServerSettings
from nanovllm.server.tokens import detokenize, tokenize

Handler = TypeVar("Handler")


def build_app(engine: Engine | None, settings: ServerSettings | None = None) -> Starlette:
    """Make the app. With engine=None it responds with 503 until `app.state.service.attach(engine)` is called.

    The app does not close the engine; the caller does.
    """
    settings = settings or ServerSettings()
    check_settings(settings)
    service = Service(engine, settings)
    app = Starlette(
        routes=[*_api_routes(service), *page_routes(service)],
        middleware=_middleware(settings),
        exception_handlers={HTTPException: _on_http_error, Exception: _on_error, ApiError: _on_error},
    )
    app.state.service = service
    return app


def _api_routes(service: Service) -> list[Route]:
    info = Info(service)
    posts = {
        **_with_and_without_version("/chat/completions", JsonPost(service, chat)),
        **_with_and_without_version("/completions", JsonPost(service, complete)),
        **_with_and_without_version("/embeddings", JsonPost(service, embed)),
        **_with_and_without_version("/responses", JsonPost(service, create_response)),
        "/v1/messages": JsonPost(service, create_message, ANTHROPIC_ERRORS),
        "/v1/messages/count_tokens": JsonPost(service, count_message_tokens, ANTHROPIC_ERRORS),
        "/tokenize": JsonPost(service, tokenize),
        "/detokenize": JsonPost(service, detokenize),
    }
    gets = {
        **_with_and_without_version("/models", info.models),
        **_with_and_without_version("/models/{name:path}", info.model),
        **_with_and_without_version("/health", info.health),
        "/ready": info.ready,
        "/load": info.load,
        "/version": info.version,
        "/tokenizer_info": info.tokenizer,
        "/metrics": info.metrics,
        "/openapi.json": _openapi,
    }
    return [
        *(Route(path, post, methods=["POST"]) for path, post in posts.items()),
        *(Route(path, get, methods=["GET"]) for path, get in gets.items()),
    ]


def _with_and_without_version(path: str, handler: Handler) -> dict[str, Handler]:
    """The same handler at two paths. Clients of llama.cpp's server leave /v1 out."""
    return {f"/v1{path}": handler, path: handler}


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """The middleware, outermost first. The API key is checked after CORS, because preflight requests have no key."""
    layers = [Middleware(RequestIds)]
    if settings.allowed_origins:
        layers.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id"],
            )
        )
    if settings.api_key:
        layers.append(Middleware(ApiKeys, keys=settings.api_key, open_paths=PAGES, open_folder=f"{STATIC}/"))
    return layers


async def _openapi(request: Request) -> Response:
    return JsonResponse(document())


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The response to a path that does not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: {request.method} {request.url.path}"
    return _error_response(ApiError(error.status_code, message, headers=error.headers))


async def _on_error(request: Request, error: Exception) -> Response:
    return _error_response(as_api_error(error))


def _error_response(error: ApiError) -> Response:
    return JsonResponse(error.body(), error.status, error.headers)
