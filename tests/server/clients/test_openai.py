"""OpenAI's Python client: chats and responses."""

from collections.abc import Iterator

import openai
import pytest

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import MAX_TOKENS, MESSAGES, QUESTION, TOOL, Place, Weather

FUNCTION = {"name": TOOL["name"], "description": TOOL["description"], "parameters": TOOL["schema"]}
CHAT = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": MAX_TOKENS}
RESPONSE = {"model": MODEL, "input": QUESTION, "temperature": 0, "max_output_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def test_chat_text_and_stream(client: openai.OpenAI) -> None:
    asked = CHAT | {"max_tokens": 16}
    whole = client.chat.completions.create(**asked).choices[0]
    choices = [chunk.choices[0] for chunk in client.chat.completions.create(**asked, stream=True)]
    pieces = [choice.delta.content for choice in choices if choice.delta.content]
    assert whole.message.content and "".join(pieces) == whole.message.content and len(pieces) > 1
    assert choices[-1].finish_reason == whole.finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "temperature"}}], ids=str)
def test_chat_tools(client: openai.OpenAI, choice: object) -> None:
    asked = {**CHAT, "tools": [openai.pydantic_function_tool(Place, name="temperature")], "tool_choice": choice}
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    for answer in (client.chat.completions.parse(**asked), streamed):
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == "temperature" and isinstance(call.function.parsed_arguments, Place)
        assert answer.choices[0].finish_reason == "tool_calls"


def test_chat_schema(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(**CHAT, response_format=Weather) as stream:
        streamed = stream.get_final_completion()
    for answer in (client.chat.completions.parse(**CHAT, response_format=Weather), streamed):
        assert isinstance(answer.choices[0].message.parsed, Weather)


def test_responses_text_and_stream(client: openai.OpenAI) -> None:
    asked = RESPONSE | {"max_output_tokens": 16}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    pieces = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text and "".join(pieces) == whole.output_text and len(pieces) > 1
    assert (events[-1].type, whole.status) == ("response.incomplete", "incomplete")


def test_responses_tools(client: openai.OpenAI) -> None:
    asked = {**RESPONSE, "tools": [{"type": "function", **FUNCTION, "strict": True}], "tool_choice": "required"}
    with client.responses.stream(**asked) as stream:
        streamed = stream.get_final_response()
    for answer in (client.responses.create(**asked), streamed):
        (call,) = answer.output
        assert (call.type, call.name) == ("function_call", "temperature")
        assert Place.model_validate_json(call.arguments)


def test_responses_schema(client: openai.OpenAI) -> None:
    with client.responses.stream(**RESPONSE, text_format=Weather) as stream:
        streamed = stream.get_final_response()
    for answer in (client.responses.parse(**RESPONSE, text_format=Weather), streamed):
        assert isinstance(answer.output_parsed, Weather)
