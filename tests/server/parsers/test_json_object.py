"""ObjectScanner against Python's json module, with the text at once and character by character."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm.server.parsers.json_object import ObjectScanner, Status

numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=4)
near_json = st.lists(
    st.sampled_from(
        [
            "{",
            "}",
            "[",
            "]",
            ",",
            ":",
            '"',
            '"a"',
            '"b":',
            "1",
            "-",
            "0",
            "1.5e3",
            "tru",
            "true",
            "null",
            "NaN",
            " ",
            "\n",
        ]
        + ["\\", '\\"', "\\u00e9", "\\u12", "é", "\x01", "x"]
    ),
    max_size=14,
).map(lambda parts: "{" + "".join(parts))


def refuse(constant: str) -> None:
    raise ValueError(constant)


def oracle(text: str) -> tuple[Any, int] | None:
    try:
        members, end = json.JSONDecoder(parse_constant=refuse, object_pairs_hook=list).raw_decode(text)
    except ValueError:
        return None
    return dict(reversed(members)), end  # of duplicate names the first counts


def scan_by_character(text: str) -> tuple[ObjectScanner, Status]:
    scanner = ObjectScanner(0)
    status = Status.GROWING
    for end in range(1, len(text) + 1):
        status = scanner.scan(text[:end])
        if status is not Status.GROWING:
            break
    return scanner, status


@settings(deadline=None)
@given(objects, st.booleans(), st.sampled_from([None, 2]), st.sampled_from(["", " tail", "}", '"']))
def test_finds_the_end_and_the_members_of_what_json_writes(
    value: dict[str, Any], ascii_only: bool, indent: int | None, tail: str
) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    whole = ObjectScanner(0)
    assert whole.scan(text + tail) is Status.COMPLETE
    by_character, status = scan_by_character(text + tail)
    assert status is Status.COMPLETE
    for scanner in (whole, by_character):
        assert scanner.end == len(text)
        assert {key: json.loads(text[place]) for key, place in scanner.members.items()} == value


@settings(deadline=None)
@given(near_json)
def test_agrees_with_json_on_what_is_nearly_json(text: str) -> None:
    whole = ObjectScanner(0)
    status = whole.scan(text)
    assert scan_by_character(text)[1] is status
    expected = oracle(text)
    assert (status is Status.COMPLETE) == (expected is not None)
    if expected is not None:
        assert whole.end == expected[1]
        members = {key: json.loads(text[place], object_pairs_hook=list) for key, place in whole.members.items()}
        assert members == expected[0]


@settings(deadline=None)
@given(near_json)
def test_members_only_grow(text: str) -> None:
    scanner = ObjectScanner(0)
    before: dict[str, str] = {}
    for end in range(1, len(text) + 1):
        status = scanner.scan(text[:end])
        members = {key: text[place] for key, place in scanner.members_so_far.items()}
        assert list(members)[: len(before)] == list(before)
        assert all(members[key].startswith(value) for key, value in before.items())
        if status is not Status.GROWING:
            break
        before = members


@settings(deadline=None)
@given(objects.map(json.dumps), st.data())
def test_every_beginning_of_an_object_may_still_grow(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text) - 1))
    assert ObjectScanner(0).scan(text[:cut]) is Status.GROWING


@pytest.mark.parametrize(
    "text",
    ["x", "[", "{x", "{,", '{"a" 1', '{"a":}', '{"a":1]', '{"a":1,}', '{"a":NaN,', '{"a":01,', '{"a\n', '{"\\x', "{<"],
)
def test_invalid_objects_are_detected_at_once(text: str) -> None:
    assert ObjectScanner(0).scan(text) is Status.INVALID


def test_deep_nesting_needs_no_stack() -> None:
    text = '{"a":' * 100_000 + "1" + "}" * 100_000
    assert ObjectScanner(0).scan(text) is Status.COMPLETE
