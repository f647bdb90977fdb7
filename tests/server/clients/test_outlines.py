"""outlines: its models for OpenAI's API and for vLLM's fields. It has no tools."""

import re
from collections.abc import Iterator

import openai
import outlines
import pytest

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import MAX_TOKENS, QUESTION, City, Weather

SETTINGS = {"temperature": 0, "max_tokens": MAX_TOKENS}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


@pytest.fixture(params=[outlines.from_openai, outlines.from_vllm], ids=["openai", "vllm"])
def model(request: pytest.FixtureRequest, client: openai.OpenAI) -> outlines.models.base.Model:
    return request.param(client, MODEL)


def test_text_and_stream(model: outlines.models.base.Model) -> None:
    whole = model(QUESTION, temperature=0, max_tokens=16)
    pieces = [piece for piece in model.stream(QUESTION, temperature=0, max_tokens=16) if piece]
    assert whole and "".join(pieces) == whole and len(pieces) > 1


def test_schema(model: outlines.models.base.Model) -> None:
    whole = model(QUESTION, Weather, **SETTINGS)
    assert Weather.model_validate_json(whole)
    assert "".join(model.stream(QUESTION, Weather, **SETTINGS)) == whole


def test_other_types(client: openai.OpenAI) -> None:
    """A regular expression, a choice and a grammar, which only vLLM's fields can express."""
    model = outlines.from_vllm(client, MODEL)
    assert re.fullmatch("[0-9]{3}-[a-z]{2}", model(QUESTION, outlines.regex("[0-9]{3}-[a-z]{2}"), **SETTINGS))
    assert model(QUESTION, City, **SETTINGS) in ("Paris", "Rome")
    assert model(QUESTION, outlines.cfg('start: "yes" | "no"'), **SETTINGS) in ("yes", "no")
