"""schemathesis checks the server against /openapi.json: it generates request bodies and checks the responses."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode, checks

from nanovllm.server.openapi import POSTS, document
from nanovllm.server.settings import ServerSettings
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine
from tests.server.process import server_process

KEPT = [
    checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.response_headers_conformance,
]
few = settings(max_examples=8, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
MESSAGE = {
    "type": "object",
    "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"type": "string"}},
    "required": ["role", "content"],
}
TEXT = {"type": "string", "minLength": 1, "maxLength": 40}
SENSIBLE: dict[str, Any] = {  # values that must all be accepted; the types alone allow more
    "messages": {"type": "array", "items": MESSAGE, "minItems": 1, "maxItems": 3},
    "prompt": {"anyOf": [TEXT, {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3}]},
    "input": TEXT,
    "model": {"const": "fake"},
    "n": {"enum": [1, 2, 3]},
    "max_tokens": {"enum": [1, 5, 10_000]},
    "temperature": {"type": "number", "minimum": 0, "maximum": 1},
    "top_p": {"type": "number", "minimum": 0.1, "maximum": 1},
    "stop": {"type": "array", "items": TEXT, "maxItems": 3},
    "seed": {"enum": [0, 7, -1]},
    "logit_bias": {"enum": [{}, {"5": 3.5}]},
    "stream": {"type": "boolean"},
    "user": {"type": "string"},
}


def sensible(described: dict[str, Any]) -> dict[str, Any]:
    """The OpenAPI document with only the fields and values of `SENSIBLE`."""
    narrow = copy.deepcopy(described)
    for name, schema in narrow["components"]["schemas"].items():
        if not name.endswith("Request"):
            continue
        known = schema["properties"].keys() & SENSIBLE.keys()
        schema["properties"] = {field: SENSIBLE[field] for field in sorted(known)}
        schema["additionalProperties"] = False
    return narrow


described = schemathesis.openapi.from_dict(document())
narrowed = schemathesis.openapi.from_dict(sensible(document())).include(
    path=["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings"]
)
narrowed.config.generation.update(modes=[GenerationMode.POSITIVE])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = LiveServer(FakeEngine("Good day to you."), ServerSettings())
    yield server.url
    server.close()


@pytest.fixture(scope="module")
def real_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server with a real engine. Its context is so short that completions without `max_tokens` end soon."""
    with server_process(tmp_path_factory.mktemp("model"), max_model_len="32") as server:
        yield server.url


def test_nothing_is_offered_that_would_be_refused() -> None:
    offered = {name: schema.get("properties", {}) for name, schema in document()["components"]["schemas"].items()}
    assert [
        (kind, field) for kind, _, _ in POSTS.values() for field in kind.unsupported if field in offered[kind.__name__]
    ] == []


@described.parametrize()
@few
def test_responses_match_the_openapi_document(case: schemathesis.Case, real_url: str) -> None:
    case.call_and_validate(base_url=real_url, checks=[*KEPT, checks.negative_data_rejection], timeout=20)


@narrowed.parametrize()
@few
def test_sensible_requests_are_accepted(case: schemathesis.Case, url: str) -> None:
    response = case.call(base_url=url, timeout=20)
    assert response.status_code == 200, response.text
    case.validate_response(response, checks=KEPT)
