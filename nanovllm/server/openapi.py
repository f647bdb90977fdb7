"""GET /openapi.json: the OpenAPI description, generated from the request types."""

from functools import cache
from typing import Any

import msgspec

from nanovllm import __version__
from nanovllm.server.messages import CountRequest, MessagesRequest
from nanovllm.server.protocol import (
    ApiRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from nanovllm.server.responses import ResponsesRequest

POSTS: dict[str, tuple[type[ApiRequest], str, bool]] = {  # path -> request type, summary, whether it can stream
    "/v1/chat/completions": (ChatRequest, "Create a chat completion", True),
    "/v1/completions": (CompletionRequest, "Create completions of prompts", True),
    "/v1/responses": (ResponsesRequest, "Create a response (stateless)", True),
    "/v1/messages": (MessagesRequest, "Create a message (Anthropic API)", True),
    "/v1/messages/count_tokens": (CountRequest, "Count the tokens of a conversation (Anthropic API)", False),
    "/v1/embeddings": (EmbeddingRequest, "Create embeddings of texts", False),
    "/tokenize": (TokenizeRequest, "Convert text to token ids", False),
    "/detokenize": (DetokenizeRequest, "Convert token ids to text", False),
}
GETS = {
    "/v1/models": "List the served model under each of its names",
    "/health": "Check that the engine is healthy",
    "/ready": "Check that another request would be accepted",
    "/load": "Get the number of prompts that wait or run",
    "/version": "Get the server's version",
    "/tokenizer_info": "Get the tokenizer's settings and the chat template",
}
COMPLETION = {
    "id": "string",
    "object": "string",
    "created": "integer",
    "model": "string",
    "choices": "array",
    "usage": "object",
}
# By path: the fields that every successful response has, and their types in JSON. A response may have more fields.
RESPONSE_FIELDS: dict[str, dict[str, str]] = {
    "/v1/chat/completions": COMPLETION,
    "/v1/completions": COMPLETION,
    "/v1/responses": {
        "id": "string",
        "object": "string",
        "created_at": "integer",
        "model": "string",
        "status": "string",
        "output": "array",
        "usage": "object",
    },
    "/v1/messages": {
        "id": "string",
        "type": "string",
        "role": "string",
        "model": "string",
        "content": "array",
        "stop_reason": "string",
        "usage": "object",
    },
    "/v1/messages/count_tokens": {"input_tokens": "integer"},
    "/v1/embeddings": {"object": "string", "model": "string", "data": "array", "usage": "object"},
    "/tokenize": {"count": "integer", "max_model_len": "integer", "tokens": "array"},
    "/detokenize": {"prompt": "string"},
    "/v1/models": {"object": "string", "data": "array"},
    "/health": {"status": "string"},
    "/ready": {"status": "string"},
    "/load": {"server_load": "integer"},
    "/version": {"version": "string"},
    "/tokenizer_info": {"tokenizer_class": "string", "model_max_length": "integer", "vocab_size": "integer"},
}
ERROR_CODES = (400, 401, 404, 408, 413, 415, 429, 500, 503, 504)


@cache
def document() -> dict[str, Any]:
    """The OpenAPI document. Fields that are always refused are left out."""
    kinds = [kind for kind, _, _ in POSTS.values()]
    _, schemas = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for kind in kinds:
        for field in kind.unsupported:
            schemas[kind.__name__]["properties"].pop(field, None)
    paths: dict[str, Any] = {path: {"post": _post(path, *entry)} for path, entry in POSTS.items()}
    for path, summary in GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(path, stream=False)}}
    metrics = {"200": {"description": "Prometheus' text format", "content": {"text/plain": {}}}}
    paths["/metrics"] = {"get": {"summary": "Get counters and histograms", "responses": metrics}}
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


def _post(path: str, kind: type, summary: str, stream: bool) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{kind.__name__}"}
    return {
        "summary": summary,
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(path, stream=stream),
    }


def _responses(path: str, *, stream: bool) -> dict[str, Any]:
    fields = {name: {"type": kind} for name, kind in RESPONSE_FIELDS[path].items()}
    schema = {"type": "object", "required": list(fields), "properties": fields}
    content: dict[str, Any] = {"application/json": {"schema": schema}}
    if stream:
        content["text/event-stream"] = {}
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    errors = {str(code): {"description": "The request was refused or failed", "content": error} for code in ERROR_CODES}
    return {"200": {"description": "The request succeeded", "content": content}, **errors}
