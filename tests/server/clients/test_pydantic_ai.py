"""pydantic-ai: agents over the chat, the responses and the messages API."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI
from pydantic_ai import Agent, ModelSettings, NativeOutput, RunContext
from pydantic_ai.capabilities import AbstractCapability
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ToolChoice

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import MAX_TOKENS, QUESTION, City, Weather
from tests.server.process import ServerProcess

pytestmark = pytest.mark.anyio
SETTINGS = ModelSettings(temperature=0, max_tokens=MAX_TOKENS)


@dataclass
class Choices(AbstractCapability[None]):
    """Sets `tool_choice` for each step of a run."""

    choices: Sequence[ToolChoice]

    def get_model_settings(self) -> Callable[[RunContext[None]], ModelSettings]:
        return lambda run: ModelSettings(tool_choice=self.choices[run.run_step - 1])


@pytest.fixture(params=["chat", "responses", "messages"])
async def model(request: pytest.FixtureRequest, server: ServerProcess, url: str) -> AsyncIterator[Model]:
    options = {"api_key": "none", "max_retries": 0, "timeout": 120}
    if request.param == "messages":
        async with AsyncAnthropic(base_url=server.url, **options) as client:
            can_answer_json = {"supports_json_schema_output": True}  # by default only models known to pydantic-ai
            yield AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=client), profile=can_answer_json)
    else:
        kind = OpenAIChatModel if request.param == "chat" else OpenAIResponsesModel
        async with AsyncOpenAI(base_url=url, **options) as client:
            yield kind(MODEL, provider=OpenAIProvider(openai_client=client))


async def test_text_and_stream(model: Model) -> None:
    agent = Agent(model, model_settings=SETTINGS | {"max_tokens": 16})
    whole = await agent.run(QUESTION)
    async with agent.run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    assert whole.output and "".join(pieces) == whole.output and len(pieces) > 1
    assert whole.usage.output_tokens == 16


@pytest.mark.parametrize(
    ("form", "last"), [(Weather, ["final_result"]), (NativeOutput(Weather), "none")], ids=["call", "native"]
)
async def test_tools_and_schema(model: Model, form: Any, last: ToolChoice) -> None:
    """A run of two steps: the tool is called, then the answer is given as a call or as the message's content."""
    choices = Choices([["temperature"], last])
    agent = Agent(model, output_type=form, model_settings=SETTINGS, capabilities=[choices], retries=0)
    called: list[City] = []

    @agent.tool_plain
    def temperature(city: City) -> int:
        """Measure the temperature in a city."""
        called.append(city)
        return 20

    result = await agent.run(QUESTION)
    assert isinstance(result.output, Weather) and len(called) == 1
    assert result.usage.requests == 2
