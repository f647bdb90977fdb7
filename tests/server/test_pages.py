"""The chat page and the engine view in headless Chromium, against a server that follows a script."""

import asyncio
import base64
import functools
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from tests.server.browser import (
    ARROW_RIGHT,
    ENTER,
    ESCAPE,
    MARKUP,
    PAGES,
    SHIFT,
    STATIC,
    TAB,
    Browser,
    Site,
    engine_view,
)
from tests.server.conftest import LiveServer
from tests.server.fake_engine import FakeEngine


@pytest.fixture(scope="module")
def driver_url() -> Iterator[str]:
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Chromium and its driver (Debian: chromium, chromium-driver)")
    command = ["chromedriver", "--port=0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        ports = (re.search(r"successfully on port (\d+)", line) for line in process.stdout)
        port = next(found[1] for found in ports if found)
        yield f"http://127.0.0.1:{port}"
        process.terminate()


@pytest.fixture(scope="module")
def window(driver_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(driver_url, f"--user-data-dir={tmp_path_factory.mktemp('profile')}", "--window-size=1200,900")
    yield browser
    browser.close()


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as site:
        serving = threading.Thread(target=functools.partial(site.serve_forever, poll_interval=0.05))
        serving.start()
        yield site
        site.shutdown()
        serving.join()


@pytest.fixture
def browser(window: Browser, site: Site, serve: Callable[..., LiveServer]) -> Iterator[Browser]:
    """The window. It leaves the page before the servers close; warnings in the console fail the test."""
    yield window
    complaints = window.complaints()
    window.open("about:blank")
    assert complaints == []


def ask(browser: Browser, question: str) -> None:
    browser.run("document.getElementById('prompt').focus()")
    browser.type(question.replace("\n", SHIFT + ENTER) + ENTER)


def wait_for_answer(browser: Browser) -> None:
    browser.until("document.querySelector('.turn:last-child .answer[aria-busy=false]')")


ANSWER = ".turn:last-child .answer > .text"
NUMBERS = ".turn:last-child .numbers"


def test_an_answer_streams_in_with_its_statistics(browser: Browser, site: Site) -> None:
    browser.open(site.url)
    browser.until("document.getElementById('model').value === 'tiny'")
    assert browser.run("return document.activeElement.id") == "prompt"
    ask(browser, "hello")
    wait_for_answer(browser)
    assert browser.text(ANSWER) == "Hello, you."
    numbers = r"42 tokens · [\d.]+ tokens/s · first token after [\d.]+ m?s · 16 of 20 prompt tokens cached"
    assert re.fullmatch(numbers, browser.text(NUMBERS))
    asked = {"role": "user", "content": "hello"}
    assert site.bodies == [
        {"model": "tiny", "messages": [asked], "stream": True, "stream_options": {"include_usage": True}}
    ]


def test_the_next_question_carries_the_conversation(browser: Browser, site: Site) -> None:
    browser.open(site.url)
    ask(browser, "hello")
    wait_for_answer(browser)
    ask(browser, "two\nlines")
    wait_for_answer(browser)
    said = [(message["role"], message["content"]) for message in site.bodies[-1]["messages"]]
    assert said == [("user", "hello"), ("assistant", "Hello, you."), ("user", "two\nlines")]
    browser.click("#new")
    ask(browser, "hello")
    wait_for_answer(browser)
    assert len(site.bodies[-1]["messages"]) == 1


@pytest.mark.parametrize("by", ["button", "key"])
def test_stopping_closes_the_request(browser: Browser, site: Site, by: str) -> None:
    browser.open(site.url)
    ask(browser, "forever")
    browser.until("document.querySelector('.answer > .text')?.innerText.includes('on on')")
    if by == "button":
        browser.click("#stop")
    else:
        browser.type(ESCAPE)
    wait_for_answer(browser)
    assert site.disconnected.wait(10)
    assert browser.text(ANSWER).startswith("on on")
    assert re.fullmatch(r"about \d+ tokens · .* · stopped", browser.text(NUMBERS))
    assert browser.run("return document.getElementById('send').checkVisibility()")


def test_reasoning_stands_apart(browser: Browser, site: Site) -> None:
    browser.open(site.url)
    ask(browser, "think")
    wait_for_answer(browser)
    assert browser.text(ANSWER) == "Done."
    assert not browser.run("return document.querySelector('.reasoning').open")
    browser.click(".reasoning summary")
    assert browser.text(".reasoning .text") == "Let me think."


def test_code_is_set_apart_and_markup_stays_text(browser: Browser, site: Site) -> None:
    browser.open(site.url)
    ask(browser, "code")
    wait_for_answer(browser)
    assert browser.run("return [...document.querySelectorAll('.answer > .text p')].map(p => p.textContent)") == [
        "Look:",
        "After.",
        MARKUP,
    ]
    assert browser.run("return document.querySelector('.code pre').textContent") == "print('<i>')\n\nx = 1"
    assert browser.run("return document.querySelectorAll('.answer img, .answer b').length") == 0


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("break", "The engine stopped."),
        ("cut", "The connection ended before the answer did."),
    ],
)
def test_an_error_is_shown_in_place_of_the_answer(browser: Browser, site: Site, question: str, message: str) -> None:
    browser.open(site.url)
    ask(browser, question)
    wait_for_answer(browser)
    assert browser.text(".answer .error") == message


def test_a_refused_question_is_not_sent_again_with_the_next(browser: Browser, site: Site) -> None:
    browser.open(site.url)
    ask(browser, "refused")
    wait_for_answer(browser)
    assert browser.text(".answer .error") == "temperature must be at least 0"
    ask(browser, "hello")
    wait_for_answer(browser)
    assert [message["content"] for message in site.bodies[-1]["messages"]] == ["hello"]
    assert all("400" in complaint for complaint in browser.complaints())


def test_parameters_are_sent_and_remembered(browser: Browser, site: Site) -> None:
    browser.open(site.url)
    browser.click("#settings-toggle")
    browser.type(f"Be brief.{TAB}0.5{TAB}0.9{TAB}20{TAB}64{TAB}7")
    browser.open(site.url)
    ask(browser, "hello")
    wait_for_answer(browser)
    body = site.bodies[-1]
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    names = ("temperature", "top_p", "top_k", "max_tokens", "seed")
    assert [body[name] for name in names] == [0.5, 0.9, 20, 64, 7]
    browser.click("#settings-toggle")
    browser.click("#parameters button[type=reset]")


def test_a_key_is_asked_for_and_sent(browser: Browser, site: Site) -> None:
    site.api_key = "secret"
    browser.open(site.url)
    browser.until("document.activeElement.id === 'key'")
    assert browser.text("#notice") == "The API key is missing or wrong."
    browser.type("secret" + ENTER)
    browser.until("document.getElementById('notice').hidden && document.getElementById('model').value")
    ask(browser, "hello")
    wait_for_answer(browser)
    assert browser.text(ANSWER) == "Hello, you."
    assert all("401" in complaint for complaint in browser.complaints())


@pytest.mark.parametrize("path", PAGES)
def test_the_theme_can_be_chosen(browser: Browser, site: Site, path: str) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    browser.open(site.url + path)
    seen = {}
    for _ in range(3):
        browser.click("#theme")
        seen[browser.text("#theme")] = browser.run(background)
    assert set(seen) == {"Theme: light", "Theme: dark", "Theme: auto"}
    assert seen["Theme: light"] != seen["Theme: dark"]


@pytest.mark.parametrize("path", PAGES)
def test_a_small_screen_needs_no_sideways_scrolling(browser: Browser, site: Site, path: str) -> None:
    browser.call("POST", "/window/rect", {"width": 500, "height": 800})
    browser.open(site.url + path)
    wide = browser.run("return document.documentElement.scrollWidth")
    narrowest = browser.run(
        "return Math.min(...[...document.querySelectorAll('header, main, #composer')].map(part => part.clientWidth))"
    )
    screen = browser.run("return innerWidth")
    browser.call("POST", "/window/rect", {"width": 1200, "height": 900})
    assert wide <= screen
    assert narrowest > 0.9 * screen


NUM_PIXELS = """
    const canvas = document.getElementById(arguments[0]);
    const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
    copy.drawImage(canvas, 0, 0);
    const { data } = copy.getImageData(0, 0, canvas.width, canvas.height);
    const wanted = arguments[1];
    let count = 0;
    for (let i = 0; i < data.length; i += 4) count += wanted === `rgb(${data[i]}, ${data[i + 1]}, ${data[i + 2]})`;
    return count;
"""


def num_pixels(browser: Browser, canvas: str, selector: str, style: str = "backgroundColor") -> int:
    """How many pixels of a canvas have the colour of an element, such as a swatch of the legend."""
    colour = browser.run(f"return getComputedStyle(document.querySelector('{selector}')).{style}")
    return browser.call("POST", "/execute/sync", {"script": NUM_PIXELS, "args": [canvas, colour]})


def watch(browser: Browser, site: Site) -> None:
    browser.open(site.url + "/engine")
    browser.until("document.querySelectorAll('#running li').length")


def test_the_engine_is_drawn(browser: Browser, site: Site) -> None:
    watch(browser, site)
    assert browser.text("#usage") == "25.0 %"
    assert browser.text("#hit-rate") == "25.0 %"
    assert browser.text("#preemptions") == "3"
    assert browser.text("#story").startswith("2 requests hold 50 of 200 blocks. 20 blocks are shared")
    free, cached = (num_pixels(browser, "blocks", f"#swatch-{state}") for state in ("free", "cached"))
    assert free / cached == pytest.approx(120 / 30)
    assert num_pixels(browser, "blocks", "body", "color") > 20 * 40  # the outlines of shared blocks
    assert num_pixels(browser, "steps", "#swatch-prefill") > 1000
    assert num_pixels(browser, "steps", "#swatch-decode") > 1000
    names = browser.run("return [...document.querySelectorAll('.queue .name')].map(name => name.textContent)")
    assert names == ["req-one", "req-two", "req-three"]
    assert "128 computed" in browser.run("return document.querySelector('#running li:nth-child(2)').ariaLabel")


def test_blocks_and_steps_are_described_by_keyboard(browser: Browser, site: Site) -> None:
    watch(browser, site)
    browser.run("document.querySelector('header a').focus()")
    browser.type(TAB + TAB)
    assert browser.text("#tooltip") == "Block 0: in use by req-one"
    browser.type(ARROW_RIGHT * 20)
    assert browser.text("#tooltip") == "Block 20: shared by several requests, req-one among them"
    browser.run("document.getElementById('steps').focus()")
    assert browser.text("#tooltip") == "12.5 ms: 128 prompt tokens, 2 decoded tokens"


def test_a_block_is_described_under_the_pointer(browser: Browser, site: Site) -> None:
    watch(browser, site)
    canvas = browser.call("POST", "/element", {"using": "css selector", "value": "#blocks"})
    corner = browser.run(
        "const b = document.getElementById('blocks'); return [-b.clientWidth / 2, -b.clientHeight / 2]"
    )
    move = {"type": "pointerMove", "origin": canvas, "x": int(corner[0]) + 5, "y": int(corner[1]) + 5}
    browser.call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})
    browser.until("document.getElementById('tooltip').innerText === 'Block 0: in use by req-one'")


def test_a_paused_or_hidden_page_requests_no_snapshots(browser: Browser, site: Site) -> None:
    watch(browser, site)
    assert site.wait_for_watchers(1)
    browser.type("p")
    assert site.wait_for_watchers(0)
    assert browser.text("#status") == "Paused"
    browser.type("p")
    assert site.wait_for_watchers(1)
    hide = "Object.defineProperty(document, 'hidden', {value: %s, configurable: true});"
    announce = "document.dispatchEvent(new Event('visibilitychange'))"
    browser.run(hide % "true" + announce)
    assert site.wait_for_watchers(0)
    browser.run(hide % "false" + announce)
    assert site.wait_for_watchers(1)


def test_a_broken_connection_is_opened_again(browser: Browser, site: Site) -> None:
    site.events_per_connection = 2
    watch(browser, site)
    assert site.wait_for_connections(2)


def test_the_engine_view_asks_for_a_key(browser: Browser, site: Site) -> None:
    site.api_key = "secret"
    browser.open(site.url + "/engine")
    browser.until("document.activeElement.id === 'key'")
    browser.type("secret" + ENTER)
    browser.until("document.querySelectorAll('#running li').length")
    assert all("401" in complaint for complaint in browser.complaints())


def test_a_hundred_thousand_blocks_fit_the_screen(browser: Browser, site: Site) -> None:
    number = 100_000
    view = engine_view()
    view["stats"]["num_blocks"] = number
    view |= {"blocks": base64.b64encode(bytes([2, 1, 0, 3] * (number // 4))).decode(), "owners": [1, 0, 0, 2] * 25_000}
    site.views, site.pace = [view], 0.5
    watch(browser, site)
    assert browser.run("return document.getElementById('blocks').clientHeight") <= 400
    assert num_pixels(browser, "blocks", "#swatch-free") == 4 * number // 4  # two by two pixels each
    assert num_pixels(browser, "blocks", "body", "color") == number // 4  # one of the four pixels of a shared block


def test_the_chat_page_talks_to_the_real_server(browser: Browser, serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngine(says="Good evening."))
    browser.open(server.url)
    browser.until("document.getElementById('model').value === 'fake'")
    ask(browser, "hello")
    wait_for_answer(browser)
    assert browser.text(ANSWER) == "Good evening."
    assert re.match(r"\d+ tokens · .*first token after", browser.text(NUMBERS))


def test_stopping_an_answer_of_the_real_server_aborts_it(browser: Browser, serve: Callable[..., LiveServer]) -> None:
    engine = FakeEngine(says="Good evening.")
    engine.gate, engine.holds_after = asyncio.Event(), 1
    server = serve(engine)
    browser.open(server.url)
    ask(browser, "hello")
    browser.until("document.querySelector('.answer > .text')?.innerText")
    browser.type(ESCAPE)
    wait_for_answer(browser)
    server.wait_until(lambda: len(engine.aborted) == 1)
    assert browser.text(NUMBERS).endswith("stopped")


def test_the_real_servers_key_opens_both_pages(browser: Browser, serve: Callable[..., LiveServer]) -> None:
    """The chat page asks for the key; the engine page in the same tab already has it."""
    server = serve(FakeEngine(), api_key=("secret",))
    browser.open(server.url)
    browser.until("document.activeElement.id === 'key'")
    browser.type("secret" + ENTER)
    browser.until("document.getElementById('model').value === 'fake'")
    assert all("401" in complaint for complaint in browser.complaints())
    browser.click("a[href=engine]")
    browser.until("document.querySelectorAll('#running li').length")


def test_the_engine_view_reads_the_real_servers_events(browser: Browser, serve: Callable[..., LiveServer]) -> None:
    server = serve(FakeEngine())
    browser.open(server.url + "/engine")
    browser.until("document.querySelectorAll('#running li').length")
    assert browser.text("#usage") == "50.0 %"
    assert browser.text("#running .name") == "a"


def test_nothing_comes_from_another_host() -> None:
    """All addresses are relative, apart from the name of the SVG namespace."""
    for file in STATIC.iterdir():
        text = file.read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?:|[\"'(]//|innerHTML|eval\(", text), file.name
