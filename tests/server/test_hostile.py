"""Hostile requests: each is refused with the field's name within bounded time, and other requests are not delayed.

The server is a separate process with a real engine, and a context so long that megabytes of text are not refused by
their length alone.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from nanovllm.text.tokenizer import Tokenizer
from tests.executor.processes import until
from tests.helpers import TOKENIZER
from tests.server.fake_engine import FakeEngine
from tests.server.process import CONTEXT, ServerProcess, server_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
SHORT = {"prompt": [5, 6, 7], "max_tokens": 2}
# On an idle machine the server needs a small fraction of either limit. The second one, relative to the attack's own
# time, detects a blocked event loop on any machine: other requests then wait as long as the attack takes.
ATTACK_SECONDS = 30.0
SLOWER = 4  # a busy machine may be this many times slower than the one that the numbers are for
# Other requests may be delayed by this many seconds plus this fraction of the attack's own time.
RESPONSE_SECONDS, RESPONSE_FRACTION = 2.0, 0.25


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("model")) as server:
        yield server


@contextmanager
def others_are_answered(server: ServerProcess) -> Iterator[None]:
    """Another client keeps requesting two tokens while the body runs; each request must be completed in time."""
    delays: list[float] = []
    first = time.monotonic()
    over = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            while True:
                began = time.monotonic()
                assert client.post(COMPLETIONS, json=SHORT).status_code == 200
                delays.append(time.monotonic() - began)
                if over.wait(0.02):
                    return

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield
    finally:
        over.set()
        asking.join(60)
    allowed = RESPONSE_SECONDS + RESPONSE_FRACTION * (time.monotonic() - first)
    assert delays and max(delays) < allowed, f"others waited {max(delays, default=60):.1f} s"


def attack(server: ServerProcess, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    with others_are_answered(server):
        began = time.monotonic()
        headers = {"content-type": "application/json"}
        response = httpx.post(server.url + path, content=content, headers=headers, timeout=2 * ATTACK_SECONDS)
        assert time.monotonic() - began < ATTACK_SECONDS
    assert len(response.content) < 10_000, "as much is sent back as came in"
    return response


def nested(depth: int, leaf: str = "1", key: str = "items") -> Any:
    return json.loads(f'{{"{key}":' * depth + leaf + "}" * depth)


# --- too much ---------------------------------------------------------------------------------------------------------

TEN_MEGABYTES = "word " * 2_000_000
JUST_BELOW = "word " * (CONTEXT * 256 // 5 - 1)  # just below the limit on characters, so all of it is tokenized

TOO_MUCH: dict[str, tuple[str, dict[str, Any], str]] = {
    "chat": (CHAT, {"messages": [{"role": "user", "content": TEN_MEGABYTES}]}, "messages"),
    "prompt": (COMPLETIONS, {"prompt": TEN_MEGABYTES}, "prompt"),
    "tokenized": (COMPLETIONS, {"prompt": JUST_BELOW}, "prompt"),
    "tokenized chat": (CHAT, {"messages": [{"role": "user", "content": JUST_BELOW}]}, "messages"),
    "messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 100_000}, "messages"),
    "template": (CHAT, {"messages": [{"role": "x" * 900, "content": ""}] * 10_000}, "messages"),
    "token ids": (COMPLETIONS, {"prompt": [5] * 1_000_000}, "prompt"),
    "embedding": ("/v1/embeddings", {"input": TEN_MEGABYTES}, "input"),
    "responses": ("/v1/responses", {"input": TEN_MEGABYTES}, "messages"),
    "detokenize": ("/detokenize", {"tokens": [5] * 1_000_000}, "tokens"),
    "template options": (
        CHAT,
        {**HELLO, "chat_template_kwargs": {f"a{i}": i for i in range(100_000)}},
        "chat_template_kwargs",
    ),
    "metadata": ("/v1/responses", {"input": "Hello", "metadata": nested(500)}, "metadata"),
    "tools": (CHAT, {**HELLO, "tools": [{"type": "function", "function": {"name": "f"}}] * 100_000}, "tools"),
    "deep tools": (
        "/tokenize",
        {**HELLO, "tools": [{"type": "function", "function": {"name": "f", "parameters": nested(900)}}]},
        "tools",
    ),
}


@pytest.mark.parametrize("name", TOO_MUCH)
def test_too_much_is_refused_by_name(name: str, server: ServerProcess) -> None:
    path, body, field = TOO_MUCH[name]
    response = attack(server, path, body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == field


def test_a_body_above_the_limit(server: ServerProcess) -> None:
    for content in (b" " * ((32 << 20) + 1), (b" " * (1 << 20) for _ in range(33))):
        headers = {"content-type": "application/json"}
        try:
            response = httpx.post(server.url + CHAT, content=content, headers=headers, timeout=ATTACK_SECONDS)
        except httpx.WriteError:  # the server responded before the whole body was sent
            continue
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
    assert httpx.post(server.url + COMPLETIONS, json=SHORT, timeout=ATTACK_SECONDS).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [' + b"[" * 10_000 + b"]" * 10_000 + b"]}",
        b'{"messages": [{"role": "user", "content": "\xc3("}]}',
    ],
    ids=["10,000 levels", "no UTF-8"],
)
def test_invalid_json(body: bytes, server: ServerProcess) -> None:
    assert attack(server, CHAT, body).status_code == 400


# --- structured outputs -----------------------------------------------------------------------------------------------

DOUBLING = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)} | {"d40": {"type": "string"}}
REFUSED: dict[str, dict[str, Any]] = {
    "schema 900 deep": {"json": nested(900, '{"type": "string"}')},
    "schema with itself": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}},
    "huge enum": {"json": {"enum": [f"value {i}" for i in range(100_000)]}},
    "product of alternatives": {
        "json": {"allOf": [{"anyOf": [{"minimum": i}, {"maximum": j}]} for i in range(30) for j in range(30)]}
    },
    "remainders": {"json": {"type": "integer", "multipleOf": 99999999}},
    "regex of a megabyte": {"regex": "a" * 1_000_000},
    "choices of megabytes": {"choice": ["x" * i for i in range(3000)]},
    "too many choices": {"choice": [str(i) for i in range(100_000)]},
    "grammar of megabytes": {"grammar": "x" * 2_000_000},
    "deep grammar": {"grammar": "root ::= " + "( " * 3000 + '"a"' + " )" * 3000},
}
TAKEN_OR_REFUSED: dict[str, dict[str, Any]] = {
    "doubling references": {"json": {"$defs": DOUBLING, "$ref": "#/$defs/d0"}},
    "long arrays of arrays": {
        "json": {"items": {"type": "array", "minItems": 10**6}, "type": "array", "minItems": 10**6}
    },
    "long string": {"json": {"type": "string", "maxLength": 10**9}},
    "nested plus": {"regex": "(a+)+$"},
    "nested plus in a schema": {"json": {"type": "string", "pattern": "^(x+x+)+y$"}},
    "long repeat": {"regex": "a{1,100000}"},
    "repeats of repeats": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "many states": {"regex": "(.*a.{20})|(.*b.{21})|(.*c.{22})"},
    "ambiguous grammar": {"grammar": 'start: start start start | start start | "a" | ""'},
    "doubling grammar": {
        "grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1}" for i in range(40)) + '\na40: "x"'
    },
}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_grammar_is_refused_by_name(name: str, server: ServerProcess) -> None:
    response = attack(server, CHAT, {**HELLO, "structured_outputs": REFUSED[name]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in REFUSED[name]


@pytest.mark.parametrize("name", TAKEN_OR_REFUSED)
def test_hostile_grammar_costs_bounded_time(name: str, server: ServerProcess) -> None:
    """A small, well-formed grammar may be accepted; generating its completion must not delay other requests either."""
    response = attack(server, CHAT, {**HELLO, "structured_outputs": TAKEN_OR_REFUSED[name]})
    given_up = response.status_code == 500 and response.json()["error"]["code"] == "engine_error"
    assert response.status_code in (200, 400) or given_up, response.text


# --- many requests at once --------------------------------------------------------------------------------------------


def post_bytes(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


def test_two_hundred_disconnected_clients_are_cleaned_up(server: ServerProcess) -> None:
    address = urlsplit(server.url)
    began = server.metric("prompt_tokens_total")
    connections = []
    for number in range(200):
        connection = socket.create_connection((address.hostname, address.port), timeout=30)
        connections.append(connection)
        body = {"prompt": [5 + number, 6, 7], "max_tokens": 10_000, "ignore_eos": True, "stream": number % 2 == 0}
        connection.sendall(post_bytes(body))
    assert until(lambda: server.metric("prompt_tokens_total") > began), "the engine has not begun"
    for connection in connections:
        connection.close()
    left = time.monotonic()
    assert httpx.post(server.url + COMPLETIONS, json=SHORT, timeout=60).status_code == 200
    assert time.monotonic() - left < 5 * SLOWER
    server.wait_until_idle(5 * SLOWER)


def test_nothing_is_left_of_them(server: ServerProcess) -> None:
    server.wait_until_idle(30)
    assert "Traceback" not in server.log()


# --- the chat template ------------------------------------------------------------------------------------------------

EXPLOITS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{% for x in range(10**9) %}{% endfor %}",
    "{{ messages[0].__init__.__globals__ }}",
    "{%- endif %}{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{# a comment #}{{ raise_exception('out') }}",
]


@pytest.mark.anyio
@pytest.mark.parametrize("exploit", EXPLOITS)
@pytest.mark.parametrize(
    "place",
    [
        lambda text: {"messages": [{"role": "user", "content": text}]},
        lambda text: {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]},
        lambda text: {"messages": [{"role": "system", "content": text}, *HELLO["messages"]]},
        lambda text: {**HELLO, "chat_template_kwargs": {"enable_thinking": text}},
        lambda text: {**HELLO, "tools": [{"type": "function", "function": {"name": "f", "description": text}}]},
    ],
    ids=["content", "part", "system", "template option", "tool"],
)
async def test_a_template_in_a_message_is_text(
    place: Callable[[str], dict[str, Any]], exploit: str, engine: FakeEngine, client: httpx.AsyncClient
) -> None:
    """The prompt equals that of a harmless text, with the exploit in its position, character by character."""
    harmless = "HARMLESS"
    for text in (harmless, exploit):
        response = await client.post(CHAT, json={**place(text), "max_tokens": 1})
        assert response.status_code == 200, response.text
    first, second = (engine.tokenizer.decode(seen[0], skip_special_tokens=False) for seen in engine.seen)
    written = json.dumps(exploit)[1:-1] if "tools" in place(exploit) else exploit
    assert second == first.replace(harmless, written)


@pytest.mark.anyio
@pytest.mark.parametrize("exploit", EXPLOITS)
async def test_a_template_as_a_role_is_refused(exploit: str, engine: FakeEngine, client: httpx.AsyncClient) -> None:
    response = await client.post(CHAT, json={"messages": [{"role": exploit, "content": "Hello"}]})
    assert response.status_code == 400 and repr(exploit) in response.json()["error"]["message"]
    assert not engine.seen


def test_the_tools_of_a_template_are_kept_from_messages() -> None:
    """The fields of a message are data: fields named like methods or hidden attributes are not used as such."""
    tokenizer = Tokenizer.from_dir(TOKENIZER)
    message = {"role": "user", "content": "Hello", "__class__": "x", "items": "y", "tool_calls": []}
    assert tokenizer.render_chat([message]) == tokenizer.render_chat(HELLO["messages"])
