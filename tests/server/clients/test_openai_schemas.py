"""OpenAI's client with nested pydantic types, as other clients send them, too: every answer ends and is valid."""

from collections.abc import Iterator
from typing import Annotated, Any

import pytest

from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER
from tests.pydantic_models import Cat, Color, Dog, Small
from tests.server.process import ServerProcess

openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")


class Person(pydantic.BaseModel):
    """A person."""

    model_config = {"extra": "forbid"}

    age: Small
    color: Color
    pet: Cat | Dog | None = None
    others: Annotated[list[Cat], pydantic.Field(max_length=2)]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as opened:
        yield opened


def settings(seed: int) -> dict[str, Any]:
    """Sampled, with a bias against whitespace, which random weights generate too much of."""
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    bias = {token: -9 for text in (" ", "\n", "\t") for token in tokenizer.encode(text, False)}
    return {"model": None, "seed": seed, "max_tokens": 400, "logit_bias": bias}


MESSAGES = [{"role": "user", "content": "Who is it?"}]


@pytest.mark.parametrize("seed", range(3))
def test_openai_parse(client: Any, seed: int) -> None:
    answer = client.chat.completions.parse(messages=MESSAGES, response_format=Person, **settings(seed))
    assert isinstance(answer.choices[0].message.parsed, Person)


@pytest.mark.parametrize("seed", range(3))
def test_plain_pydantic_schema(client: Any, seed: int) -> None:
    """As outlines and instructor's JSON mode send it: without `strict`, and without the client's changes to it."""
    schema = {"name": "person", "schema": Person.model_json_schema()}
    del schema["schema"]["additionalProperties"]
    answer = client.chat.completions.create(
        messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema}, **settings(seed)
    )
    assert answer.choices[0].finish_reason == "stop"
    assert Person.model_validate_json(answer.choices[0].message.content)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "person"}}], ids=str)
def test_tools(client: Any, choice: Any) -> None:
    """As instructor and smolagents send them: a named or a required tool whose parameters are a model's schema."""
    parameters = Person.model_json_schema()
    del parameters["additionalProperties"]
    tools = [
        {"type": "function", "function": {"name": "person", "description": "A person.", "parameters": parameters}},
        openai.pydantic_function_tool(Cat, name="cat"),
    ]
    models = {"person": Person, "cat": Cat}
    for seed in range(3):
        answer = client.chat.completions.create(messages=MESSAGES, tools=tools, tool_choice=choice, **settings(seed))
        (call,) = answer.choices[0].message.tool_calls
        assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
        assert models[call.function.name].model_validate_json(call.function.arguments, extra="forbid")
