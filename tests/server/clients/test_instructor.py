"""instructor: over the chat API. Not among the test packages."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import MAX_TOKENS, MESSAGES, Weather

instructor = pytest.importorskip("instructor", reason="needs instructor, which requires an older rich and jiter")

ASKED = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": MAX_TOKENS, "max_retries": 0}


@pytest.fixture(params=["TOOLS", "JSON_SCHEMA"])
def client(request: pytest.FixtureRequest, url: str) -> Iterator[Any]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as opened:
        yield instructor.from_openai(opened, mode=instructor.Mode[request.param])


def test_text_and_stream(client: Any) -> None:
    asked = {**ASKED, "max_tokens": 16, "response_model": None}
    whole = client.chat.completions.create(**asked).choices[0].message.content
    chunks = client.chat.completions.create(**asked, stream=True)
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert whole and "".join(pieces) == whole and len(pieces) > 1


def test_tools_and_schema(client: Any) -> None:
    """In the mode TOOLS the answer is the call of a named tool, in the mode JSON_SCHEMA it is the message's content."""
    assert isinstance(client.create(**ASKED, response_model=Weather), Weather)


def test_partial_answers(client: Any) -> None:
    *_, last = client.create_partial(**ASKED, response_model=Weather)
    assert Weather.model_validate(last.model_dump())
