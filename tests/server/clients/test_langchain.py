"""LangChain's client for OpenAI's API."""

import pytest
from langchain_openai import ChatOpenAI

from tests.server.clients.conftest import MODEL
from tests.server.clients.test_openai_schemas import Person, settings
from tests.server.clients.weather import MAX_TOKENS, QUESTION, Place


@pytest.fixture(scope="module")
def chat(url: str) -> ChatOpenAI:
    limits = {"max_tokens": MAX_TOKENS, "max_retries": 0, "timeout": 120}
    return ChatOpenAI(base_url=url, api_key="none", model=MODEL, temperature=0, **limits)


def test_text_and_stream(chat: ChatOpenAI) -> None:
    whole = chat.invoke(QUESTION, max_tokens=16)
    pieces = [chunk.content for chunk in chat.stream(QUESTION, max_tokens=16) if chunk.content]
    assert whole.content and "".join(pieces) == whole.content and len(pieces) > 1
    assert whole.response_metadata["finish_reason"] == "length"


def test_tools(chat: ChatOpenAI) -> None:
    answer = chat.bind_tools([Place], tool_choice="required").invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "Place" and Place.model_validate(call["args"])


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_schema(url: str, method: str) -> None:
    sampled = {key: value for key, value in settings(5).items() if key != "seed"}
    chat = ChatOpenAI(base_url=url, api_key="none", model=MODEL, max_retries=0, timeout=120, extra_body=sampled)
    assert isinstance(chat.with_structured_output(Person, method=method).invoke(QUESTION), Person)
