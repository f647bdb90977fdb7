"""Structured outputs over HTTP from a real engine with random weights, so only the masks make a completion match."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER
from tests.server.process import ServerProcess, server_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HELLO = [{"role": "user", "content": "Hello"}]
SCHEMAS = json.loads((Path(__file__).parent.parent / "data" / "schemas" / "draft2020-12.json").read_text())
CHOICES = ["yes", "no", "vielleicht 🙂", 'say "no"\n\\']
REGEX = r"[0-9]{3}-(ab|cd|é世)+[^a-z]{2}"
GRAMMAR = 'start: "a" item ("," item){0,3}\nitem: /[x-z]{1,4}/'
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 10},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["человек", "猫", None]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "age", "kind", "tags"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "register", "parameters": PERSON}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}},
]


def closers() -> dict[str, float]:
    """A bias towards tokens that end strings, arrays and objects, which random weights seldom generate."""
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    return {str(token): 6.0 for text in ('"', "}", "]", "<|im_end|>") for token in tokenizer.encode(text, False)}


SAMPLED = {"temperature": 1.0, "max_tokens": 150, "logit_bias": closers()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("model")) as server:
        yield server


def ask_all(server: ServerProcess, path: str, bodies: Sequence[dict[str, Any]]) -> list[httpx.Response]:
    """Send all requests at once, as many clients would."""

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
            return await asyncio.gather(*(client.post(path, json=body) for body in bodies))

    return asyncio.run(ask())


def events(response: httpx.Response) -> list[dict[str, Any]]:
    *lines, last = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in lines]


def streamed(response: httpx.Response) -> tuple[str, str | None]:
    choices = [choice for event in events(response) for choice in event["choices"]]
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


def answered(response: httpx.Response) -> tuple[str, str | None]:
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["message"]["content"], choice["finish_reason"]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


def is_valid(text: str, schema: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(json.loads(text))


# --- real schemas -----------------------------------------------------------------------------------------------------


def test_real_schemas(server: ServerProcess) -> None:
    """Each schema is refused, or every finished completion is valid; streamed or not, the completion is the same."""
    cases = [case for case in SCHEMAS if isinstance(case["schema"], dict)]
    bodies = [{"messages": HELLO, **SAMPLED, "seed": 7, **schema_format(case["schema"])} for case in cases]
    whole = ask_all(server, CHAT, bodies)
    in_pieces = ask_all(server, CHAT, [{**body, "stream": True} for body in bodies])
    num_finished = 0
    for case, one, other in zip(cases, whole, in_pieces, strict=True):
        if one.status_code == 400:
            assert one.json()["error"]["param"] and other.json() == one.json(), case["description"]
            continue
        text, end = answered(one)
        assert streamed(other) == (text, end), case["description"]
        if end == "stop":
            num_finished += 1
            assert is_valid(text, case["schema"]), (case["description"], text)
    assert num_finished >= 20, "too few answers came to their end to say anything"


# --- every kind, through every API ------------------------------------------------------------------------------------

KINDS: dict[str, tuple[dict[str, Any], Callable[[str], bool]]] = {
    "json": ({"json": PERSON}, lambda text: is_valid(text, PERSON)),
    "json as text": ({"json": json.dumps(PERSON)}, lambda text: is_valid(text, PERSON)),
    "regex": ({"regex": REGEX}, lambda text: re.fullmatch(REGEX, text) is not None),
    "choice": ({"choice": CHOICES}, CHOICES.__contains__),
    "grammar": ({"grammar": GRAMMAR}, lambda text: re.fullmatch("a[x-z]{1,4}(,[x-z]{1,4}){0,3}", text) is not None),
    "json_object": ({"json_object": True}, lambda text: isinstance(json.loads(text), dict)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(kind: str, server: ServerProcess) -> None:
    form, fits = KINDS[kind]
    bodies = [{"messages": HELLO, **SAMPLED, "seed": seed, "structured_outputs": form} for seed in range(6)]
    found = [answered(response) for response in ask_all(server, CHAT, bodies)]
    assert [streamed(response) for response in ask_all(server, CHAT, [b | {"stream": True} for b in bodies])] == found
    plain = [{"prompt": "Hello", **SAMPLED, "n": 4, "seed": 1, "structured_outputs": form}]
    choices = ask_all(server, COMPLETIONS, plain)[0].json()["choices"]
    found += [(choice["text"], choice["finish_reason"]) for choice in choices]
    texts = [text for text, end in found if end == "stop"]
    assert len(texts) >= 5, "too few answers came to their end to say anything"
    for text in texts:
        assert fits(text), text


AGE = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["age"]}


def test_objects_with_properties_are_closed(server: ServerProcess) -> None:
    """The same schema through every field that takes one: the only key is generated once, and the answer ends."""
    plain = {"messages": HELLO, "max_tokens": 150, "seed": 3}
    schema = {"name": "x", "schema": AGE}
    tool = {"name": "make", "parameters": AGE}
    bodies = [
        {**plain, "response_format": {"type": "json_schema", "json_schema": schema}},
        {**plain, "response_format": {"type": "json_schema", "json_schema": {**schema, "strict": True}}},
        {**plain, "structured_outputs": {"json": AGE}},
        {**plain, "tools": [{"type": "function", "function": tool}], "tool_choice": "required"},
        {**plain, "tools": [{"type": "function", "function": {**tool, "strict": True}}], "tool_choice": "required"},
    ]
    texts = []
    for response in ask_all(server, CHAT, bodies):
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        calls = choice["message"].get("tool_calls")
        assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
        texts.append(calls[0]["function"]["arguments"] if calls else choice["message"]["content"])
    text_format = {"type": "json_schema", **schema}
    (answer,) = ask_all(
        server, RESPONSES, [{"input": "Hello", "max_output_tokens": 150, "text": {"format": text_format}}]
    )
    assert answer.json()["status"] == "completed"
    texts.append(answer.json()["output"][0]["content"][0]["text"])
    assert len(texts) == 6
    for text in texts:
        pairs = json.loads(text, object_pairs_hook=list)
        assert [key for key, _ in pairs] == ["age"] and is_valid(text, AGE), text


def test_the_fields_of_llama_cpp(server: ServerProcess) -> None:
    """A grammar in GBNF and a schema in all the places that llama.cpp takes it from."""
    grammar = 'root ::= "yes" | "no" [0-9]'
    forms = [{"grammar": grammar}, {"json_schema": AGE}, {"response_format": {"type": "json_object", "schema": AGE}}]
    plain = {"max_tokens": 150, "seed": 3}
    chats = ask_all(server, CHAT, [{"messages": HELLO, **plain, **form} for form in forms])
    prompts = ask_all(server, COMPLETIONS, [{"prompt": "Hello", **plain, **form} for form in forms])
    texts = [answered(response)[0] for response in chats]
    texts += [response.json()["choices"][0]["text"] for response in prompts]
    for constrained, schema, same_schema in (texts[:3], texts[3:]):
        assert re.fullmatch("yes|no[0-9]", constrained)
        assert is_valid(schema, AGE) and is_valid(same_schema, AGE)
    (refused,) = ask_all(server, CHAT, [{"messages": HELLO, "grammar": "root ::= undefined"}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "grammar")


def test_the_responses_api(server: ServerProcess) -> None:
    form = {"text": {"format": {"type": "json_schema", "name": "x", "schema": PERSON}}}
    bodies = [{"input": f"Hello {number}", "max_output_tokens": 200, **form} for number in range(6)]
    answers = [response.json() for response in ask_all(server, RESPONSES, bodies)]
    done = [answer for answer in answers if answer["status"] == "completed"]
    assert len(done) >= 3
    for answer in done:
        (item,) = answer["output"]
        assert is_valid(item["content"][0]["text"], PERSON)


def test_the_messages_api(server: ServerProcess) -> None:
    form = {"output_config": {"format": {"type": "json_schema", "schema": AGE}}}
    plain = {"messages": HELLO, "max_tokens": 150, "temperature": 0, **form}
    whole, in_pieces = ask_all(server, MESSAGES, [plain, plain | {"stream": True}])
    (block,) = whole.json()["content"]
    assert is_valid(block["text"], AGE) and whole.json()["stop_reason"] == "end_turn"
    lines = [line.removeprefix("data: ") for line in in_pieces.text.splitlines() if line.startswith("data: ")]
    deltas = [event["delta"] for event in map(json.loads, lines) if event["type"] == "content_block_delta"]
    assert "".join(delta["text"] for delta in deltas) == block["text"]


def test_thinking_budget(server: ServerProcess) -> None:
    """A prompt that ends with <think>: </think>, which is made very unlikely, comes after as many tokens as allowed."""
    close = Tokenizer.from_dir(TOKENIZER).backend.token_to_id("</think>")
    common = {"prompt": "Hello<think>", "max_tokens": 12, "ignore_eos": True, "logit_bias": {str(close): -100}}
    bodies = [{**common, "return_token_ids": True, "thinking_token_budget": budget, "seed": 1} for budget in range(6)]
    for budget, response in enumerate(ask_all(server, COMPLETIONS, bodies)):
        (choice,) = response.json()["choices"]
        assert len(choice["token_ids"]) == 12 and choice["token_ids"].index(close) == budget


# --- forced calls -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "register"}}], ids=str)
def test_forced_calls_have_valid_arguments(choice: Any, server: ServerProcess) -> None:
    parameters = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    asked = {"messages": HELLO, **SAMPLED, "tools": TOOLS, "tool_choice": choice, "max_tokens": 400}
    bodies = [{**asked, "seed": seed} for seed in range(6)]
    num_done = 0
    whole = ask_all(server, CHAT, bodies)
    for one, other in zip(whole, ask_all(server, CHAT, [b | {"stream": True} for b in bodies]), strict=True):
        (answer,) = one.json()["choices"]
        calls = [call["function"] for call in answer["message"].get("tool_calls") or []]
        pieces: dict[int, list[str]] = {}
        for event in events(other):
            for call in event["choices"][0]["delta"].get("tool_calls") or []:
                pieces.setdefault(call["index"], ["", ""])
                pieces[call["index"]][0] += call["function"].get("name") or ""
                pieces[call["index"]][1] += call["function"].get("arguments") or ""
        assert [[call["name"], call["arguments"]] for call in calls] == list(pieces.values())
        if answer["finish_reason"] == "length":
            continue
        num_done += 1
        assert calls
        for call in calls:
            assert choice == "required" or call["name"] == "register"
            assert is_valid(call["arguments"], parameters[call["name"]])
    assert num_done >= 3, "too few calls came to their end to say anything"


def test_auto_with_a_response_format_is_a_call_or_the_content(server: ServerProcess) -> None:
    tool = {"type": "function", "function": {"name": "make", "parameters": AGE}}
    body = {"messages": HELLO, **SAMPLED, "tools": [tool], **schema_format(PERSON)}
    for response in ask_all(server, CHAT, [{**body, "seed": seed} for seed in range(6)]):
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        message = choice["message"]
        if choice["finish_reason"] == "tool_calls":
            assert message["content"] is None
            assert all(is_valid(call["function"]["arguments"], AGE) for call in message["tool_calls"])
        elif choice["finish_reason"] == "stop":
            assert is_valid(message["content"], PERSON)


def test_a_forced_call_has_no_response_format(server: ServerProcess) -> None:
    """The format describes the content, and a forced call has none. A grammar would describe the call as well."""
    function = {"name": "make", "parameters": AGE}
    schema = {"name": "x", "schema": PERSON}
    chat = {"messages": HELLO, "max_tokens": 150, "tools": [{"type": "function", "function": function}]}
    chat["tool_choice"] = "required"
    asked = {
        CHAT: {**chat, "response_format": {"type": "json_schema", "json_schema": schema}},
        RESPONSES: {
            "input": "Hello",
            "max_output_tokens": 150,
            "tools": [{"type": "function", **function}],
            "tool_choice": {"type": "function", "name": "make"},
            "text": {"format": {"type": "json_schema", **schema}},
        },
        MESSAGES: {
            "messages": HELLO,
            "max_tokens": 150,
            "tools": [{"name": "make", "input_schema": AGE}],
            "tool_choice": {"type": "any"},
            "output_config": {"format": {"type": "json_schema", "schema": PERSON}},
        },
    }
    answers = {path: ask_all(server, path, [body])[0].json() for path, body in asked.items()}
    (call,) = answers[CHAT]["choices"][0]["message"]["tool_calls"]
    (item,) = answers[RESPONSES]["output"]
    (block,) = answers[MESSAGES]["content"]
    for arguments in (call["function"]["arguments"], item["arguments"], json.dumps(block["input"])):
        assert is_valid(arguments, AGE)
    (refused,) = ask_all(server, CHAT, [{**chat, "structured_outputs": {"json": PERSON}}])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tool_choice")
