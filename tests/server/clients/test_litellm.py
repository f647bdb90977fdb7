"""litellm: its providers for OpenAI's API, for vLLM and for Anthropic's API. Not among the test packages."""

from typing import Any

import pytest

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import MAX_TOKENS, MESSAGES, TOOL, Place, Weather
from tests.server.process import ServerProcess

litellm = pytest.importorskip("litellm", reason="needs litellm, which requires another version of openai")

pytestmark = pytest.mark.filterwarnings("default")  # it warns about its own code
FUNCTION = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["schema"]}


@pytest.fixture(params=["openai", "hosted_vllm", "anthropic"])
def asked(request: pytest.FixtureRequest, server: ServerProcess, url: str) -> dict[str, Any]:
    return {
        "model": f"{request.param}/{MODEL}",
        "api_base": server.url if request.param == "anthropic" else url,
        "api_key": "none",
        "messages": MESSAGES,
        "temperature": 0,
        "max_tokens": MAX_TOKENS,
        "timeout": 120,
        "max_retries": 0,
    }


def test_text_and_stream(asked: dict[str, Any]) -> None:
    asked["max_tokens"] = 16
    whole = litellm.completion(**asked).choices[0]
    choices = [chunk.choices[0] for chunk in litellm.completion(**asked, stream=True)]
    pieces = [choice.delta.content for choice in choices if choice.delta.content]
    assert whole.message.content and "".join(pieces) == whole.message.content and len(pieces) > 1
    assert choices[-1].finish_reason == whole.finish_reason == "length"


def test_tools(asked: dict[str, Any]) -> None:
    asked |= {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"}
    whole = litellm.completion(**asked)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    for answer in (whole, streamed):
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "temperature" and Place.model_validate_json(call.function.arguments)
        assert answer.choices[0].finish_reason == "tool_calls"


def test_schema(asked: dict[str, Any]) -> None:
    asked["response_format"] = Weather
    whole = litellm.completion(**asked)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**asked, stream=True)))
    for answer in (whole, streamed):
        assert Weather.model_validate_json(answer.choices[0].message.content)
