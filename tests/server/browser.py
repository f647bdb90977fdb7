"""A scripted web site for the pages of the server, and a browser driven over WebDriver."""

import base64
import itertools
import json
import re
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parents[2] / "nanovllm" / "server" / "static"
PAGES = {"/": "chat.html", "/engine": "engine.html"}
TYPES = {".html": "text/html; charset=utf-8", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
CSP = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
ENTER, ESCAPE, SHIFT, ARROW_RIGHT, TAB = "\ue007", "\ue00c", "\ue008", "\ue014", "\ue004"  # WebDriver's key codes
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the key of an element's id in WebDriver's JSON


class Site(ThreadingHTTPServer):
    """Serves the pages, and responds to their requests from the script that the question names."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.api_key: str | None = None
        self.bodies: list[dict[str, Any]] = []
        self.disconnected = threading.Event()
        self.watched = threading.Condition()
        self.num_watchers = self.num_connections = 0
        self.events_per_connection: int | None = None
        self.pace = 0.02  # seconds between two events
        self.views: list[dict[str, Any]] = [engine_view()]

    def wait_for_watchers(self, number: int) -> bool:
        with self.watched:
            return self.watched.wait_for(lambda: self.num_watchers == number, timeout=10)

    def wait_for_connections(self, number: int) -> bool:
        with self.watched:
            return self.watched.wait_for(lambda: self.num_connections >= number, timeout=10)

    def count_watchers(self, change: int) -> None:
        with self.watched:
            self.num_watchers += change
            self.num_connections += change > 0
            self.watched.notify_all()


class Handler(BaseHTTPRequestHandler):
    server: Site

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = PAGES.get(self.path, self.path.removeprefix("/static/"))
        if self.path == "/v1/models" and self.allowed():
            self.reply(json.dumps({"object": "list", "data": [{"id": "tiny", "object": "model"}]}))
        elif self.path == "/engine/events" and self.allowed():
            self.stream_views()
        elif (STATIC / path).is_file():
            self.reply((STATIC / path).read_text(), TYPES[Path(path).suffix])
        else:
            self.reply(json.dumps({"error": {"message": "There is nothing here."}}), status=404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not self.allowed():
            return
        self.server.bodies.append(body)
        script = SCRIPTS[body["messages"][-1]["content"]]
        if isinstance(script, dict):
            self.reply(json.dumps(script), status=400)
        else:
            self.stream(script())

    def allowed(self) -> bool:
        key = self.server.api_key
        if key is None or self.headers["Authorization"] == f"Bearer {key}":
            return True
        self.reply(json.dumps({"error": {"message": "The API key is missing or wrong."}}), status=401)
        return False

    def reply(self, text: str, kind: str = "application/json", status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Security-Policy", CSP)
        self.end_headers()
        self.wfile.write(content)

    def stream(self, events: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:
            for event in events:
                lines = "".join(f"data: {line}\n" for line in event.splitlines())
                self.wfile.write(f": a comment\n\n{lines}\n".encode())
                threading.Event().wait(self.server.pace)
        except (BrokenPipeError, ConnectionResetError):
            self.server.disconnected.set()

    def stream_views(self) -> None:
        def views() -> Iterator[str]:
            yield from map(json.dumps, self.server.views)
            while True:
                yield json.dumps({**self.server.views[-1], "steps": []})

        self.server.count_watchers(1)
        self.stream(itertools.islice(views(), self.server.events_per_connection))
        self.server.count_watchers(-1)


def chunk(finish_reason: str | None = None, **delta: str) -> str:
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}]})


def chunks(*pieces: str, finish_reason: str = "stop") -> Iterator[str]:
    yield chunk(role="assistant", content="")
    yield from (chunk(content=piece) for piece in pieces)
    yield chunk(finish_reason=finish_reason)
    details = {"cached_tokens": 16}
    usage = {"prompt_tokens": 20, "completion_tokens": 42, "total_tokens": 62, "prompt_tokens_details": details}
    yield json.dumps({"choices": [], "usage": usage})
    yield "[DONE]"


def reasoned() -> Iterator[str]:
    yield chunk(role="assistant", content="")
    yield chunk(reasoning="Let me ", reasoning_content="Let me ")
    yield chunk(reasoning="think.", reasoning_content="think.")
    yield from chunks("Done.")


def endless() -> Iterator[str]:
    yield chunk(role="assistant", content="")
    while True:
        yield chunk(content="on ")


def broken() -> Iterator[str]:
    yield chunk(content="half an ")
    yield json.dumps({"error": {"message": "The engine stopped.", "type": "server_error"}}, indent=1)


MARKUP = "<img src=x onerror=alert(1)> & <b>bold</b>"
SCRIPTS: dict[str, Any] = {
    "hello": lambda: chunks("Hello", ", ", "you."),
    "two\nlines": lambda: chunks("Two."),
    "code": lambda: chunks("Look:\n\n``", "`py\nprint('<i>')\n", "\nx = 1\n```\n", f"After.\n\n{MARKUP}"),
    "think": reasoned,
    "forever": endless,
    "refused": {"error": {"message": "temperature must be at least 0", "param": "temperature"}},
    "break": broken,
    "cut": lambda: iter([chunk(content="cut")]),
}


def engine_view() -> dict[str, Any]:
    """200 blocks: 40 in use by the first request, 20 of them shared with the second, which has 10 more; 30 cached."""
    states = [2] * 20 + [3] * 20 + [2] * 10 + [1] * 30 + [0] * 120
    owners = [1] * 40 + [2] * 10 + [0] * 150
    stats = {"num_running": 2, "num_waiting": 1, "num_blocks": 200, "num_free_blocks": 120, "num_cached_blocks": 30}
    stats |= {"num_preemptions": 3, "prefix_queries": 400, "prefix_hits": 100}
    stats |= {"num_prompt_tokens": 900, "num_generation_tokens": 70}
    return {
        "stats": stats,
        "blocks": base64.b64encode(bytes(states)).decode(),
        "owners": owners,
        "running": [["req-one", 600, 40, 640, 1], ["req-two", 300, 0, 128, 2]],
        "waiting": [["req-three", 50, 0, 0, 0]],
        "steps": [[i / 10, 128 * (i % 2), 2, 12.5] for i in range(250)],
    }


class Browser:
    """One Chromium window, controlled with plain WebDriver calls."""

    def __init__(self, driver_url: str, *arguments: str) -> None:
        quiet = ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic"]
        options = {"args": ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", *quiet, *arguments]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}, "timeouts": {"script": 10000}}
        self.url = f"{driver_url}/session"
        self.url += "/" + self.call("POST", "", {"capabilities": {"alwaysMatch": wanted}})["sessionId"]

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        request = urllib.request.Request(self.url + path, method=method)
        request.add_header("Content-Type", "application/json")
        data = json.dumps(body or {}).encode() if method == "POST" else None
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(request, data, timeout=60) as response:
            return json.loads(response.read())["value"]

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def until(self, condition: str) -> None:
        """Wait until the JavaScript expression is true; times out after ten seconds."""
        poll = f"const done = arguments[0], poll = () => ({condition}) ? done() : setTimeout(poll, 10); poll();"
        self.call("POST", "/execute/async", {"script": poll, "args": []})

    def text(self, selector: str) -> str:
        return self.run(f"return document.querySelector({selector!r}).innerText")

    def click(self, selector: str) -> None:
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{found[ELEMENT]}/click")

    def type(self, keys: str) -> None:
        """Type keys into the focused element. Shift applies to the one key after it."""
        actions: list[dict[str, str]] = []
        for held, key in re.findall(f"({SHIFT}?)(.)", keys, re.DOTALL):
            press = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
            shift = [{"type": kind, "value": SHIFT} for kind in ("keyDown", "keyUp")]
            actions += [shift[0], *press, shift[1]] if held else press
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def complaints(self) -> list[str]:
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("SEVERE", "WARNING")]

    def close(self) -> None:
        self.call("DELETE", "")
