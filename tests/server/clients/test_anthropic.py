"""Anthropic's Python client."""

from collections.abc import Iterator

import anthropic
import pytest

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import MAX_TOKENS, MESSAGES, TOOL, Place, Weather
from tests.server.process import ServerProcess

MESSAGE = {"model": MODEL, "messages": MESSAGES, "max_tokens": MAX_TOKENS, "extra_body": {"temperature": 0}}
TOOLS = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["schema"]}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def test_text_and_stream(client: anthropic.Anthropic) -> None:
    whole = client.messages.create(**MESSAGE | {"max_tokens": 16})
    with client.messages.stream(**MESSAGE | {"max_tokens": 16}) as stream:
        pieces = list(stream.text_stream)
        final = stream.get_final_message()
    assert whole.content[0].text and final.content[0].text == whole.content[0].text
    assert len(pieces) > 1 and "".join(pieces) == whole.content[0].text
    assert final.stop_reason == whole.stop_reason == "max_tokens"


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "temperature"}], ids=str)
def test_tools(client: anthropic.Anthropic, choice: dict[str, str]) -> None:
    asked = {**MESSAGE, "tools": TOOLS, "tool_choice": choice}
    with client.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for answer in (client.messages.create(**asked), streamed):
        (call,) = answer.content
        assert (call.type, call.name, answer.stop_reason) == ("tool_use", "temperature", "tool_use")
        assert Place.model_validate(call.input)


def test_schema(client: anthropic.Anthropic) -> None:
    with client.messages.stream(**MESSAGE, output_format=Weather) as stream:
        streamed = stream.get_final_message()
    for answer in (client.messages.parse(**MESSAGE, output_format=Weather), streamed):
        assert isinstance(answer.parsed_output, Weather) and answer.stop_reason == "end_turn"
