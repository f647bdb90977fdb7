"""smolagents: its model for OpenAI's API, and an agent that calls tools until it calls `final_answer`."""

import pytest
import smolagents

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import MAX_TOKENS, MESSAGES, QUESTION, Weather


class FinalAnswer(smolagents.Tool):
    """The tool that ends a run, with few possible answers."""

    name = "final_answer"
    description = "Give the final answer."
    inputs = {"answer": {"type": "string", "description": "The answer.", "enum": ["warm", "cold"]}}
    output_type = "string"

    def forward(self, answer: str) -> str:
        return answer


class Temperature(smolagents.Tool):
    name = "temperature"
    description = "Measure the temperature in a city."
    inputs = {"city": {"type": "string", "description": "The city.", "enum": ["Paris", "Rome"]}}
    output_type = "integer"

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def forward(self, city: str) -> int:
        self.called.append(city)
        return 20


def make_model(url: str, max_tokens: int = MAX_TOKENS) -> smolagents.OpenAIModel:
    return smolagents.OpenAIModel(
        MODEL,
        api_base=url,
        api_key="none",
        client_kwargs={"max_retries": 0, "timeout": 120},
        temperature=0,
        max_tokens=max_tokens,
    )


def test_text_and_stream(url: str) -> None:
    model = make_model(url, max_tokens=16)
    whole = model.generate(MESSAGES)
    pieces = [delta.content for delta in model.generate_stream(MESSAGES) if delta.content]
    assert whole.content and "".join(pieces) == whole.content and len(pieces) > 1
    assert whole.token_usage.output_tokens == 16


def test_schema(url: str) -> None:
    schema = {"name": "weather", "schema": Weather.model_json_schema()}
    answer = make_model(url).generate(MESSAGES, response_format={"type": "json_schema", "json_schema": schema})
    assert Weather.model_validate_json(answer.content)


@pytest.mark.parametrize("stream", [False, True])
def test_an_agent_calls_its_tool_and_ends(url: str, stream: bool) -> None:
    """The agent has one tool at a time: random weights would call either one, any number of times."""
    tool = Temperature()
    agent = smolagents.ToolCallingAgent(
        [tool, FinalAnswer()], make_model(url), max_steps=3, stream_outputs=stream, verbosity_level=0
    )
    final_answer = agent.tools.pop("final_answer")

    def leave_only_the_final_answer(step: smolagents.ActionStep, agent: smolagents.ToolCallingAgent) -> None:
        agent.tools = {"final_answer": final_answer}

    agent.step_callbacks.register(smolagents.ActionStep, leave_only_the_final_answer)
    assert agent.run(QUESTION) in ("warm", "cold")
    assert tool.called in (["Paris"], ["Rome"])
    assert [len(step.tool_calls) for step in agent.memory.steps if isinstance(step, smolagents.ActionStep)] == [1, 1]
