"""A short soak of the real server: twenty seconds of what `python -m nanovllm.bench.soak` does for ten minutes."""

import dataclasses
import json
from typing import Any

import pytest

from nanovllm.bench import soak
from nanovllm.bench.soak import CHAT, COMPLETIONS, EMBEDDINGS, SoakRequest, Usage, compare, what_is_wrong


def test_nothing_is_left_after_twenty_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    status = soak.main(["--minutes", str(20 / 60)])
    printed = capsys.readouterr()
    assert status == 0, printed
    rows = {line[:16].strip(): line[16:].split() for line in printed.out.split("\n\n")[0].splitlines()[1:]}
    sent, answered, turned_away, refused, left, lost = (int(cell.replace(",", "")) for cell in rows["all"][:6])
    assert sent == answered + turned_away + refused + left and lost == 0
    assert min(answered, turned_away, refused, left) > 0, "the soak did not do all that it says"


# --- the soak detects faults ------------------------------------------------------------------------------------------


def event(**choice: Any) -> bytes:
    return (
        b"data: %b\n\n" % json.dumps({"choices": [{"index": 0, "finish_reason": None, "delta": {}} | choice]}).encode()
    )


DONE = b"data: [DONE]\n\n"
WHOLE = event(delta={"content": "y"}) + event(delta={"content": "es"}) + event(finish_reason="stop") + DONE


@pytest.mark.parametrize(
    ("path", "streams", "body", "told"),
    [
        (CHAT, True, WHOLE, None),
        (CHAT, True, WHOLE.removesuffix(DONE), "no end"),
        (CHAT, True, b"", "ValueError"),
        (CHAT, True, event(delta={"content": "yes"}) + DONE, "finish_reason"),
        (CHAT, True, event(delta={"content": "yes"}) + b'data: {"error": {"message": "x"}}\n\n' + DONE, "error"),
        (CHAT, True, WHOLE.replace(b'"es"', b'"ep"'), "form"),
        (CHAT, False, b'{"choices": [{"message": {"content": "yes"}, "finish_reason": "stop"}]}', None),
        (CHAT, False, b'{"choices": [{"message": {"content": "yep"}, "finish_reason": "stop"}]}', "form"),
        (CHAT, False, b'{"choices": [{"message": {"content": "ye"}, "finish_reason": "length"}]}', None),
        (CHAT, False, b'{"choices": []}', "empty"),
        (CHAT, False, b'{"choices"', "JSON"),
        (COMPLETIONS, False, b'{"choices": [{"text": "yes", "finish_reason": "abort"}]}', "abort"),
        (EMBEDDINGS, False, b'{"data": [{"embedding": []}]}', "finish_reason"),
    ],
)
def test_an_incomplete_response_is_noticed(path: str, streams: bool, body: bytes, told: str | None) -> None:
    wrong = what_is_wrong(SoakRequest("x", path, b"", streams, fits=lambda text: text == "yes"), body)
    assert wrong is None if told is None else wrong is not None and told in wrong


def test_leftovers_are_noticed() -> None:
    before = Usage(0, 0, 0, {"server": 50.0, "engine": 300.0}, {"server": 9.0})
    assert {row["verdict"] for row in compare(before, before)} == {"ok"}
    for field, worse in {
        "running": 1,
        "waiting": 1,
        "cache_in_use": 0.01,
        "memory_mib": {"server": 100.0, "engine": 300.0},
        "open_files": {"server": 20.0},
    }.items():
        after = dataclasses.replace(before, **{field: worse})
        assert [row["verdict"] for row in compare(before, after)].count("NO") == 1, field
