"""How much a model thinks: `reasoning_effort`, `reasoning.effort`, `thinking` and `thinking_token_budget`."""

from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend

from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER
from tests.server.conftest import open_client
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{{ messages[-1].content }}|effort={{ reasoning_effort | default('-') }}"
    "|thinking={{ enable_thinking | default('-') }}|"
)


@pytest.fixture
def engine() -> FakeEngine:
    """Its chat template writes the variables that it was given."""
    engine = FakeEngine()
    engine.tokenizer = Tokenizer(Backend.from_file(str(TOKENIZER / "tokenizer.json")), chat_template=TEMPLATE)
    return engine


async def ask(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    common = {CHAT: {"messages": HELLO}, RESPONSES: {"input": "Hello"}, MESSAGES: {"messages": HELLO, "max_tokens": 60}}
    return await client.post(path, json={**common[path], **fields})


def rendered(engine: FakeEngine) -> str:
    assert engine.tokenizer is not None
    _, _, variables = engine.tokenizer.decode(engine.seen[-1][0]).partition("|")
    return variables


@pytest.mark.parametrize("effort", ["none", "minimal", "low", "medium", "high", "xhigh"])
async def test_effort_reaches_the_template(effort: str, engine: FakeEngine, client: httpx.AsyncClient) -> None:
    expected = f"effort={effort}|thinking={False if effort == 'none' else '-'}|"
    assert (await ask(client, CHAT, reasoning_effort=effort)).status_code == 200
    assert rendered(engine) == expected
    answer = await ask(client, RESPONSES, reasoning={"effort": effort, "summary": "auto"})
    assert answer.status_code == 200 and answer.json()["reasoning"] == {"effort": effort, "summary": "auto"}
    assert rendered(engine) == expected
    assert (await ask(client, MESSAGES, output_config={"effort": effort})).status_code == 200
    assert rendered(engine) == expected


async def test_without_an_effort_the_template_decides(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    for path, fields in (
        (CHAT, {}),
        (CHAT, {"reasoning_effort": None}),
        (RESPONSES, {"reasoning": {}}),
        (RESPONSES, {"reasoning": {"effort": None, "summary": None}}),
        (MESSAGES, {"thinking": None, "output_config": {}}),
    ):
        assert (await ask(client, path, **fields)).status_code == 200
        assert rendered(engine) == "effort=-|thinking=-|"


async def test_template_variables_of_the_request_win(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    given = {"chat_template_kwargs": {"enable_thinking": True}}
    for path, fields in (
        (CHAT, {"reasoning_effort": "none"}),
        (RESPONSES, {"reasoning": {"effort": "none"}}),
        (MESSAGES, {"thinking": {"type": "disabled"}, "output_config": {"effort": "none"}}),
    ):
        assert (await ask(client, path, **fields, **given)).status_code == 200
        assert rendered(engine) == "effort=none|thinking=True|"


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"reasoning_effort": "utmost"}, "reasoning_effort"),
        (CHAT, {"reasoning_effort": 3}, "reasoning_effort"),
        (CHAT, {"thinking_token_budget": -1}, "thinking_token_budget"),
        (RESPONSES, {"reasoning": {"effort": "utmost"}}, "reasoning"),
        (RESPONSES, {"reasoning": {"summary": "detailed"}}, "summary"),
        (RESPONSES, {"reasoning": {"generate_summary": "auto"}}, "generate_summary"),
        (MESSAGES, {"output_config": {"format": {"type": "json_schema"}}}, "format"),
        (MESSAGES, {"output_config": {"effort": "utmost"}}, "output_config"),
        (MESSAGES, {"thinking": {"type": "enabled"}}, "budget_tokens"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 0}}, "budget_tokens"),
        (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": True}}, "budget_tokens"),
        (MESSAGES, {"thinking": {"type": "deep"}}, "thinking"),
        (MESSAGES, {"thinking": {}}, "thinking"),
        (MESSAGES, {"thinking": {"type": "adaptive", "display": "loud"}}, "display"),
    ],
)
async def test_refused_by_name(client: httpx.AsyncClient, path: str, fields: dict[str, Any], named: str) -> None:
    response = await ask(client, path, **fields)
    assert response.status_code == 400 and named in response.json()["error"]["message"], response.text


async def test_thinking_of_the_messages_api(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    engine.says = "<think>\nHm.\n</think>\n\nYes."
    answer = (await ask(client, MESSAGES, thinking={"type": "enabled", "budget_tokens": 7})).json()
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert engine.seen[-1][1].thinking_token_budget == 7 and rendered(engine) == "effort=-|thinking=True|"
    for thinking in ({"type": "adaptive"}, {"type": "adaptive", "display": "summarized"}):
        answer = (await ask(client, MESSAGES, thinking=thinking)).json()
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        assert engine.seen[-1][1].thinking_token_budget is None and rendered(engine) == "effort=-|thinking=True|"
    answer = (await ask(client, MESSAGES, thinking={"type": "adaptive", "display": "omitted"})).json()
    assert [block["type"] for block in answer["content"]] == ["text"]
    assert (await ask(client, MESSAGES, thinking={"type": "disabled"})).status_code == 200
    assert rendered(engine) == "effort=-|thinking=False|"


async def test_budget_of_the_other_apis(engine: FakeEngine, client: httpx.AsyncClient) -> None:
    for path in (CHAT, RESPONSES):
        assert (await ask(client, path, thinking_token_budget=5)).status_code == 200
        assert engine.seen[-1][1].thinking_token_budget == 5
    assert (await client.post("/v1/completions", json={"prompt": "a", "thinking_token_budget": 6})).status_code == 200
    assert engine.seen[-1][1].thinking_token_budget == 6


async def test_models_whose_reasoning_cannot_be_limited(plain_tokenizer: Tokenizer) -> None:
    """Without the token </think> a model does not think, or the length limit is the limit of its reasoning."""
    engine = FakeEngine(says="<think>Hm.</think>Yes.")
    engine.tokenizer = plain_tokenizer
    thinking = {"type": "enabled", "budget_tokens": 7}
    async with open_client(engine) as client:
        response = await ask(client, MESSAGES, thinking=thinking)
        assert response.status_code == 400 and "does not reason" in response.json()["error"]["message"]
        assert (await ask(client, MESSAGES, thinking={"type": "adaptive"})).status_code == 200
    async with open_client(engine, reasoning_parser="qwen3") as client:
        answer = (await ask(client, MESSAGES, thinking=thinking)).json()
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
        assert engine.seen[-1][1].thinking_token_budget is None
