"""GET /openapi.json: the API described for programs, made from the requests' own types."""

from functools import cache
from typing import Any

import msgspec

from nanovllm import __version__
from nanovllm.server.messages import CountRequest, MessagesRequest
from nanovllm.server.protocol import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from nanovllm.server.responses import ResponsesRequest

POSTS: dict[str, tuple[type, str, bool]] = {  # path -> request, summary, can it stream
    "/v1/chat/completions": (ChatRequest, "Answer a conversation", True),
    "/v1/completions": (CompletionRequest, "Continue texts", True),
    "/v1/responses": (ResponsesRequest, "Answer a conversation, statelessly", True),
    "/v1/messages": (MessagesRequest, "Answer a conversation (Anthropic's API)", True),
    "/v1/messages/count_tokens": (CountRequest, "Count a conversation's tokens (Anthropic's API)", False),
    "/v1/embeddings": (EmbeddingRequest, "Texts as vectors", False),
    "/tokenize": (TokenizeRequest, "Text to token ids", False),
    "/detokenize": (DetokenizeRequest, "Token ids to text", False),
}
GETS = {
    "/v1/models": "The served model, under each of its names",
    "/health": "Is the engine well",
    "/ready": "Would one more request be taken",
    "/version": "The server's version",
}
ERROR_CODES = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


@cache
def document() -> dict[str, Any]:
    kinds = [kind for kind, _, _ in POSTS.values()]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        for field in REFUSED.get(kind, ()):
            schemas[kind.__name__]["properties"].pop(field, None)
    paths: dict[str, Any] = {path: {"post": _post(*told)} for path, told in POSTS.items()}
    paths |= {path: {"get": {"summary": about, "responses": _responses(stream=False)}} for path, about in GETS.items()}
    metrics = {"200": {"description": "Prometheus' text format", "content": {"text/plain": {}}}}
    paths["/metrics"] = {"get": {"summary": "Counters and histograms", "responses": metrics}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "nanovllm", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _post(kind: type, summary: str, stream: bool) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(stream=stream),
    }


def _responses(*, stream: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if stream:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    refusals = {str(code): {"description": "Refused or failed", "content": error} for code in ERROR_CODES}
    return {"200": {"description": "Done", "content": content}, **refusals}
