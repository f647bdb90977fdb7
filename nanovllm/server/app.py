"""`build_app(engine)`: the server as an ASGI app for any host. No globals, no signal handlers, no command line."""

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
from nanovllm.server.http import JsonAnswer, JsonPost
from nanovllm.server.info import Info
from nanovllm.server.messages import ANTHROPIC, count_message_tokens, create_message
from nanovllm.server.middleware import ApiKeys, RequestIds
from nanovllm.server.openapi import document
from nanovllm.server.pages import PAGES, STATIC, page_routes
from nanovllm.server.responses import create_response
from nanovllm.server.service import Service
from nanovllm.server.settings import ServerSettings
from nanovllm.server.tokens import detokenize, tokenize


def build_app(engine: Engine | None, settings: ServerSettings | None = None) -> Starlette:
    """The app over an engine; with None it answers 503 until `app.state.service.attach(engine)`.

    The engine stays its owner's to close.
    """
    settings = settings or ServerSettings()
    check_settings(settings)
    service = Service(engine, settings)
    app = Starlette(
        routes=[*_api_routes(service), *page_routes(service)],
        middleware=_middleware(settings),
        exception_handlers={HTTPException: _answer_http_error, Exception: _answer_error, ApiError: _answer_error},
    )
    app.state.service = service
    return app


def _api_routes(service: Service) -> list[Route]:
    info = Info(service)
    posts = {
        "/v1/chat/completions": JsonPost(service, chat),
        "/v1/completions": JsonPost(service, complete),
        "/v1/embeddings": JsonPost(service, embed),
        "/v1/responses": JsonPost(service, create_response),
        "/v1/messages": JsonPost(service, create_message, ANTHROPIC),
        "/v1/messages/count_tokens": JsonPost(service, count_message_tokens, ANTHROPIC),
        "/tokenize": JsonPost(service, tokenize),
        "/detokenize": JsonPost(service, detokenize),
    }
    gets = {
        "/v1/models": info.models,
        "/v1/models/{name:path}": info.model,
        "/health": info.health,
        "/ready": info.ready,
        "/version": info.version,
        "/metrics": info.metrics,
        "/openapi.json": _openapi,
    }
    return [
        *(Route(path, post, methods=["POST"]) for path, post in posts.items()),
        *(Route(path, get, methods=["GET"]) for path, get in gets.items()),
    ]


def _middleware(settings: ServerSettings) -> list[Middleware]:
    """Outermost first. The key is asked for behind CORS, whose preflight requests carry none."""
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
    return JsonAnswer(document())


async def _answer_http_error(request: Request, error: Exception) -> Response:
    """A path that does not exist, or not with this method."""
    assert isinstance(error, HTTPException)
    told = ApiError(error.status_code, f"{error.detail}: {request.method} {request.url.path}", headers=error.headers)
    return JsonAnswer(told.body(), told.status, told.headers)


async def _answer_error(request: Request, error: Exception) -> Response:
    told = as_api_error(error)
    return JsonAnswer(told.body(), told.status, told.headers)
