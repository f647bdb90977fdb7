"""OpenAI's Agents SDK: over the chat and the responses API."""

from collections.abc import AsyncIterator

import agents
import openai
import pytest

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import MAX_TOKENS, QUESTION, City, Weather

pytestmark = pytest.mark.anyio
WITHOUT_TRACES = agents.RunConfig(tracing_disabled=True)  # they would be sent to OpenAI


@pytest.fixture(params=[agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel])
async def model(request: pytest.FixtureRequest, url: str) -> AsyncIterator[agents.Model]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield request.param(MODEL, client)


async def test_text_and_stream(model: agents.Model) -> None:
    # For the SDK, a response that ends at the limit of tokens is an error. This one ends before.
    settings = agents.ModelSettings(temperature=0, extra_body={"structured_outputs": {"regex": "[a-z ]{20}"}})
    agent = agents.Agent("reporter", model=model, model_settings=settings)
    whole = await agents.Runner.run(agent, QUESTION, run_config=WITHOUT_TRACES)
    streamed = agents.Runner.run_streamed(agent, QUESTION, run_config=WITHOUT_TRACES)
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert whole.final_output and streamed.final_output == whole.final_output
    assert kinds.count("response.output_text.delta") > 1


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_and_schema(model: agents.Model, stream: bool) -> None:
    """A run of two turns: the tool must be called in the first, then there is none, and the answer has a schema."""
    called: list[City] = []

    @agents.function_tool(is_enabled=lambda context, agent: not called)
    def temperature(city: City) -> int:
        """Measure the temperature in a city."""
        called.append(city)
        return 20

    agent = agents.Agent(
        "reporter",
        instructions="Report the weather.",
        model=model,
        model_settings=agents.ModelSettings(temperature=0, max_tokens=MAX_TOKENS, tool_choice="required"),
        tools=[temperature],
        output_type=Weather,
    )
    if stream:
        result = agents.Runner.run_streamed(agent, QUESTION, max_turns=3, run_config=WITHOUT_TRACES)
        names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
        assert names == ["tool_called", "tool_output", "message_output_created"]
    else:
        result = await agents.Runner.run(agent, QUESTION, max_turns=3, run_config=WITHOUT_TRACES)
    assert isinstance(result.final_output, Weather) and len(called) == 1
    assert len(result.raw_responses) == 2
