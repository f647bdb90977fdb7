"""SamplingParams: refused values with their messages, accepted limits, normalisation, copies, repr."""

import math
from typing import Any

import pytest

from nanovllm.engine.beam_search import BeamSearchParams
from nanovllm.sampling_params import MAX_LOGPROBS, MAX_N, SamplingParams, StructuredOutputs
from nanovllm.structured_outputs import grammar_source

NAN, INF = math.nan, math.inf

REFUSED: list[Any] = [  # field, value, part of the rule
    ("n", 0, "integer of at least 1 and at most 128"),
    ("n", MAX_N + 1, "at most 128"),
    ("n", 1.0, "integer"),
    ("n", True, "integer"),
    ("n", None, "integer"),
    ("n", "2", "integer"),
    ("temperature", -0.1, "finite number in [0, inf)"),
    ("temperature", NAN, "finite number"),
    ("temperature", INF, "finite number"),
    ("temperature", "hot", "finite number"),
    ("temperature", None, "finite number"),
    ("temperature", False, "finite number"),
    pytest.param("temperature", 10**400, "finite number", id="temperature-huge"),
    ("top_p", 0, "(0, 1]"),
    ("top_p", 1.01, "(0, 1]"),
    ("top_p", NAN, "(0, 1]"),
    ("top_k", -2, "integer of at least -1"),
    ("top_k", 0.5, "integer"),
    ("top_k", True, "integer"),
    ("min_p", -0.01, "[0, 1]"),
    ("min_p", 1.01, "[0, 1]"),
    ("min_p", NAN, "[0, 1]"),
    ("presence_penalty", -2.01, "[-2, 2]"),
    ("presence_penalty", 2.01, "[-2, 2]"),
    ("presence_penalty", NAN, "[-2, 2]"),
    ("frequency_penalty", -2.01, "[-2, 2]"),
    ("frequency_penalty", 2.01, "[-2, 2]"),
    ("frequency_penalty", INF, "[-2, 2]"),
    ("repetition_penalty", 0, "(0, inf)"),
    ("repetition_penalty", -1, "(0, inf)"),
    ("repetition_penalty", INF, "(0, inf)"),
    ("repetition_penalty", NAN, "(0, inf)"),
    ("seed", 1.5, "integer"),
    ("seed", 2**64, "at most 18446744073709551615"),
    ("seed", -(2**63) - 1, "at least -9223372036854775808"),
    ("seed", True, "integer"),
    ("stop", "", "non-empty string"),
    ("stop", ["a", ""], "non-empty string"),
    ("stop", ["a", 1], "non-empty string"),
    ("stop", 5, "non-empty string"),
    ("stop", b"ab", "non-empty string"),
    ("stop", {"a"}, "non-empty string"),
    ("stop_token_ids", [-1], "token ids"),
    ("stop_token_ids", [1.0], "token ids"),
    ("stop_token_ids", [True], "token ids"),
    ("stop_token_ids", "12", "token ids"),
    ("stop_token_ids", b"12", "token ids"),
    ("stop_token_ids", 12, "token ids"),
    ("allowed_token_ids", (), "at least one token, or be None"),
    ("allowed_token_ids", [-1], "token ids"),
    ("allowed_token_ids", ["1"], "token ids"),
    ("allowed_token_ids", "12", "token ids"),
    ("allowed_token_ids", 12, "token ids"),
    ("bad_words", "", "non-empty string"),
    ("bad_words", [""], "non-empty string"),
    ("bad_words", [3], "non-empty string"),
    ("bad_words", 3, "non-empty string"),
    ("include_stop_str_in_output", 1, "True or False"),
    ("ignore_eos", None, "True or False"),
    ("skip_special_tokens", "yes", "True or False"),
    ("detokenize", 0, "True or False"),
    ("max_tokens", 0, "integer of at least 1"),
    ("max_tokens", -1, "integer of at least 1"),
    ("max_tokens", 1.5, "integer"),
    ("max_tokens", True, "integer"),
    ("min_tokens", -1, "integer of at least 0"),
    ("min_tokens", None, "integer"),
    ("min_tokens", 65, "must not exceed max_tokens=64"),
    ("logprobs", -1, "integer of at least 0 and at most 100"),
    ("logprobs", MAX_LOGPROBS + 1, "at most 100"),
    ("logprobs", True, "integer"),
    ("prompt_logprobs", -1, "integer of at least 0"),
    ("prompt_logprobs", MAX_LOGPROBS + 1, "at most 100"),
    ("prompt_logprobs", 0.0, "integer"),
    ("logit_bias", [(1, 2.0)], "map token ids to numbers in [-100, 100]"),
    ("logit_bias", "1", "map token ids"),
]


@pytest.mark.parametrize("field, value, rule", REFUSED)
def test_refused_naming_field_value_and_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    message = str(error.value)
    assert message.startswith(f"{field}={value!r}: "), message
    assert rule in message


@pytest.mark.parametrize(
    "bias, named, rule",
    [
        ({-1: 0.0}, "logit_bias token=-1", "integer of at least 0"),
        ({"5": 0.0}, "logit_bias token='5'", "integer"),
        ({True: 0.0}, "logit_bias token=True", "integer"),
        ({5: 100.5}, "logit_bias[5]=100.5", "[-100, 100]"),
        ({5: -100.5}, "logit_bias[5]=-100.5", "[-100, 100]"),
        ({5: NAN}, "logit_bias[5]=nan", "finite"),
        ({5: None}, "logit_bias[5]=None", "finite"),
        ({1: 0.0, 5: "x"}, "logit_bias[5]='x'", "finite"),
    ],
)
def test_refused_logit_bias_names_the_entry(bias: dict[Any, Any], named: str, rule: str) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(logit_bias=bias)
    assert named in str(error.value) and rule in str(error.value)


def test_stop_strings_need_text() -> None:
    with pytest.raises(ValueError, match=r"stop=\('x',\).*detokenize=True or use stop_token_ids"):
        SamplingParams(stop="x", detokenize=False)
    SamplingParams(stop_token_ids=[1], detokenize=False)


def test_unknown_names_and_positions_are_refused() -> None:
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)
    with pytest.raises(TypeError):
        SamplingParams(1)


ACCEPTED: list[dict[str, Any]] = [
    {"n": 1},
    {"n": MAX_N},
    {"temperature": 0},
    {"temperature": 0.0},
    {"temperature": 1e-9},
    {"temperature": 1000},
    {"top_p": 1},
    {"top_p": 1e-9},
    {"top_k": -1},
    {"top_k": 0},
    {"top_k": 10**9},
    {"min_p": 0},
    {"min_p": 1.0},
    {"presence_penalty": -2},
    {"presence_penalty": 2},
    {"frequency_penalty": -2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 1e-9},
    {"repetition_penalty": 100},
    {"seed": 0},
    {"seed": -(2**63)},
    {"seed": 2**64 - 1},
    {"max_tokens": 1},
    {"max_tokens": None},
    {"max_tokens": None, "min_tokens": 10**6},
    {"max_tokens": 5, "min_tokens": 5},
    {"logprobs": 0},
    {"logprobs": MAX_LOGPROBS},
    {"prompt_logprobs": 0},
    {"prompt_logprobs": MAX_LOGPROBS},
    {"logit_bias": {}},
    {"logit_bias": {0: -100, 7: 100.0}},
    {"allowed_token_ids": [0]},
    {"stop": []},
    {"stop_token_ids": []},
    {"bad_words": []},
]


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_accepted_at_the_edge(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    for field, value in options.items():
        expected = tuple(value) if isinstance(value, list) else value
        assert getattr(params, field) == expected


def test_the_defaults() -> None:
    params = SamplingParams()
    assert (params.n, params.temperature, params.max_tokens, params.min_tokens) == (1, 1.0, 64, 0)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.seed is None and params.logprobs is None and params.prompt_logprobs is None
    assert not params.ignore_eos and not params.include_stop_str_in_output
    assert params.skip_special_tokens and params.detokenize


# --- normalising, copying, printing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, normal",
    [
        ("stop", None, ()),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", ("a",), ("a",)),
        ("bad_words", None, ()),
        ("bad_words", ["no", "nope"], ("no", "nope")),
        ("stop_token_ids", None, ()),
        ("stop_token_ids", [3, 1], (3, 1)),
        ("stop_token_ids", range(3), (0, 1, 2)),
        ("allowed_token_ids", [2, 2], (2, 2)),
    ],
)
def test_lists_become_tuples(field: str, value: Any, normal: tuple[Any, ...]) -> None:
    assert getattr(SamplingParams(**{field: value}), field) == normal


def test_later_changes_of_a_list_do_not_reach_the_params() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[5] = 9.0
    assert params.stop == ("a",)
    assert params.logit_bias == {1: 2.0}


def test_frozen() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().temperature = 0.5


def test_greedy_is_temperature_zero() -> None:
    assert SamplingParams(temperature=0).greedy and not SamplingParams(temperature=0.01).greedy


EVERY_FIELD: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.2,
    "repetition_penalty": 1.1,
    "seed": 3,
    "stop": ["x"],
    "stop_token_ids": [1],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "max_tokens": 9,
    "min_tokens": 2,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["y"],
    "skip_special_tokens": False,
}


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(**EVERY_FIELD)], ids=["defaults", "every field"])
def test_clone_copies_changes_and_checks(params: SamplingParams) -> None:
    assert params.clone() == params
    changed = params.clone(temperature=0.0, stop="z")
    assert (changed.temperature, changed.stop) == (0.0, ("z",))
    assert changed.clone(temperature=params.temperature, stop=params.stop) == params
    with pytest.raises(ValueError, match="top_p=2"):
        params.clone(top_p=2)


def test_repr_tells_what_differs_and_can_be_read_back() -> None:
    assert repr(SamplingParams()) == "SamplingParams()"
    assert repr(SamplingParams(temperature=0.0, stop="a", max_tokens=None)) == (
        "SamplingParams(temperature=0.0, stop=('a',), max_tokens=None)"
    )
    full = SamplingParams(**EVERY_FIELD)
    assert all(f"{field}=" in repr(full) for field in EVERY_FIELD)
    assert eval(repr(full), {"SamplingParams": SamplingParams}) == full


# --- structured outputs -----------------------------------------------------------------------------------------------

FORMS = [
    ({"json": {"type": "object"}}, ("json", '{"type": "object"}')),
    ({"json": ' {"type":"object"}'}, ("json", ' {"type":"object"}')),
    ({"json_object": True}, ("json", '{"type": "object"}')),
    ({"regex": "a+é"}, ("regex", "a+é")),
    ({"choice": ["b", "a", "b"]}, ("choice", '["b", "a"]')),
    ({"grammar": 'start: "a"'}, ("grammar", 'start: "a"')),
]


@pytest.mark.parametrize("options, source", FORMS, ids=str)
def test_structured_outputs(options: dict[str, Any], source: tuple[str, str]) -> None:
    form = StructuredOutputs(**options)
    assert grammar_source(vars(form)) == source
    assert hash(form) == hash(StructuredOutputs(**options))
    params = SamplingParams(structured_outputs=form)
    assert params.clone(seed=1).structured_outputs is form
    names = {"SamplingParams": SamplingParams, "StructuredOutputs": StructuredOutputs}
    assert eval(repr(params), names) == params


def nested(depth: int) -> Any:
    schema: Any = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    "options, rule",
    [
        ({}, "nothing is set"),
        ({"regex": "a", "choice": ["a"]}, "regex, choice are set"),
        ({"json_object": 1}, "True or False"),
        ({"json": {}, "json_object": True}, "json, json_object are set"),
        ({"json": "{"}, "not a JSON schema"),
        ({"json": "[]"}, "a JSON schema must be an object"),
        ({"json": "true"}, "a JSON schema must be an object"),
        ({"json": 5}, "a JSON schema must be an object"),
        ({"json": {"const": NAN}}, "not a JSON schema"),
        ({"json": '{"const": Infinity}'}, "Infinity is not JSON"),
        ({"json": {"const": {1, 2}}}, "not a JSON schema"),
        ({"json": nested(65)}, "deeper than 64"),
        ({"json": '{"items":' * 50_000}, "262144"),
        ({"json": "[" * 200_000}, "deeper than 64"),
        ({"json": {"const": "a" * 262_144}}, "at most 262144"),
        ({"json": {"const": "\ud800"}}, "surrogate"),
        ({"regex": ""}, "non-empty string"),
        ({"regex": 5}, "non-empty string"),
        ({"regex": "é" * 4097}, "must have at most 8192 bytes, and has 8194 bytes"),
        ({"regex": "\ud800"}, "surrogate"),
        ({"grammar": "a" * 65_537}, "at most 65536"),
        ({"choice": []}, "must have 1 to 1024 strings"),
        ({"choice": "ab"}, "list of strings"),
        ({"choice": ["a", ""]}, "non-empty string"),
        ({"choice": ["a", 1]}, "non-empty string"),
        ({"choice": [str(i) for i in range(1025)]}, "must have 1 to 1024 strings"),
        ({"choice": ["a" * 65_537]}, "at most 65536"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_structured_outputs_refused(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError) as error:
        StructuredOutputs(**options)
    assert rule in str(error.value)


def test_structured_outputs_at_their_limits() -> None:
    StructuredOutputs(json=nested(64))
    StructuredOutputs(regex="a" * 8192)
    StructuredOutputs(grammar="a" * 65_536)
    StructuredOutputs(choice=[str(i) for i in range(1024)])


def test_long_grammar_has_a_short_repr() -> None:
    assert len(repr(StructuredOutputs(regex="a" * 8000))) < 120


@pytest.mark.parametrize("value", [{"regex": "a"}, "a", True])
def test_structured_outputs_must_be_their_class(value: Any) -> None:
    with pytest.raises(ValueError, match="must be a StructuredOutputs"):
        SamplingParams(structured_outputs=value)


# --- beams ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field, value, rule",
    [
        ("beam_width", 0, "integer of at least 1 and at most 50"),
        ("beam_width", 51, "at most 50"),
        ("beam_width", 2.0, "integer"),
        ("max_tokens", 0, "integer of at least 1"),
        ("max_tokens", None, "integer"),
        ("ignore_eos", 1, "True or False"),
        ("length_penalty", NAN, "finite number"),
        ("length_penalty", INF, "finite number"),
        ("length_penalty", "1", "finite number"),
    ],
)
def test_beam_search_refused(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ValueError) as error:
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, field: value})
    assert str(error.value).startswith(f"{field}={value!r}: ") and rule in str(error.value)


@pytest.mark.parametrize("options", [{"beam_width": 1}, {"beam_width": 50}, {"length_penalty": -1}], ids=str)
def test_beam_search_accepted(options: dict[str, Any]) -> None:
    params = BeamSearchParams(**{"beam_width": 4, "max_tokens": 8, **options})
    assert all(getattr(params, field) == value for field, value in options.items())
