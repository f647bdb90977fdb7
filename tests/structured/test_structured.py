"""Structured outputs through the whole engine. The weights are random, so only the masks make a completion match."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.consistency import check_scheduler
from nanovllm.errors import RequestError
from nanovllm.outputs import CompletionOutput
from nanovllm.sampling_params import StructuredOutputs
from tests.helpers import (
    TEXT_MODEL,
    TOKENIZER,
    VOCAB_SIZE,
    compiler_of,
    copy_of,
    edit_config,
    open_llm,
    prompt_of,
    scheduler_of,
)

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = json.loads((Path(__file__).parent.parent / "data" / "schemas" / "draft2020-12.json").read_text())
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "größe": {"type": "number", "minimum": 0.5, "maximum": 2.5},
        "kind": {"enum": ["человек", "猫", "🙂", None, 3]},
        "address": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "city": {"const": 'a "b" \\ c'}},
            "required": ["zip", "city"],
            "additionalProperties": False,
        },
        "tags": {"type": "array", "items": {"type": "integer", "minimum": -20, "maximum": 20}, "maxItems": 3},
    },
    "required": ["name", "größe", "kind", "address", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "choice": StructuredOutputs(choice=["yes", "no", "y", "vielleicht 🙂 ünï", 'say "no"\n\\']),
    "regex": StructuredOutputs(regex=r"\d{3}-(ab|cd|é世)+[^a-z]{2}"),
    "schema": StructuredOutputs(json=PERSON),
    "lark": StructuredOutputs(grammar='start: item ("," item){0,3}\nitem: "(" item? ")" | /[x-z]{1,4}/'),
    "gbnf": StructuredOutputs(grammar='root ::= "a" [b-d]{2,5} tail\ntail ::= "z" | "yy" tail?'),
}


def fits(form: str, text: str) -> bool:
    if form == "choice":
        return text in FORMS["choice"].choice  # type: ignore[operator]
    if form == "schema":
        return bool(jsonschema.Draft202012Validator(PERSON).is_valid(json.loads(text)))
    patterns = {
        "regex": FORMS["regex"].regex,
        "lark": r"(\(*([x-z]{1,4})?\)*)(,\(*([x-z]{1,4})?\)*){0,3}",
        "gbnf": r"a[b-d]{2,5}(yy)*(z|yy)",
    }
    return re.fullmatch(str(patterns[form]), text) is not None


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(TEXT_MODEL) as llm:
        yield llm


def closers(llm: LLM) -> dict[int, float]:
    """A bias towards tokens that end strings, arrays and objects, which random weights seldom generate."""
    assert llm.tokenizer is not None
    return {token: 6.0 for text in ('"', "}", "]", "<|im_end|>") for token in llm.tokenizer.encode(text, False)}


def answers(llm: LLM, prompts: Any, params: Any) -> list[CompletionOutput]:
    return [part for output in llm.generate(prompts, params, use_tqdm=False) for part in output.outputs]


# --- every completion matches its grammar -----------------------------------------------------------------------------


def requests() -> list[tuple[str, list[int], SamplingParams]]:
    """(form, prompt, parameters): each form greedy and sampled, combined with every other logits processor."""
    shared = prompt_of(20, seed=3)
    extras: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 1, "n": 2},
        {"temperature": 1.5, "seed": 2, "top_p": 0.9, "presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.0, "seed": 3, "top_k": 5, "logprobs": 2, "logit_bias": {70: 9.0}},
    ]
    return [
        (
            form,
            shared + prompt_of(4 + index, seed=index),
            SamplingParams(max_tokens=180, structured_outputs=spec, **extra),
        )
        for index, extra in enumerate(extras)
        for form, spec in FORMS.items()
    ]


def run(options: dict[str, Any]) -> tuple[list[list[tuple[str, str | None]]], int]:
    with open_llm(TEXT_MODEL, **options) as llm:
        wanted = requests()
        outputs = llm.generate([prompt for _, prompt, _ in wanted], [params for *_, params in wanted], use_tqdm=False)
        texts = [[(part.text, part.finish_reason) for part in output.outputs] for output in outputs]
        scheduler = scheduler_of(llm)
        check_scheduler(scheduler)
        assert scheduler.block_manager.num_available == scheduler.config.num_blocks
        return texts, scheduler.num_preemptions


@pytest.fixture(scope="module")
def expected() -> list[list[tuple[str, str | None]]]:
    return run({})[0]


def test_completions_match_their_grammar(expected: list[list[tuple[str, str | None]]]) -> None:
    ended = [
        (form, text)
        for (form, *_), parts in zip(requests(), expected, strict=True)
        for text, why in parts
        if why == "stop"
    ]
    assert len(ended) > 0.8 * sum(map(len, expected)), "too few completions finished for a meaningful test"
    assert {form for form, _ in ended} == set(FORMS)
    for form, text in ended:
        assert fits(form, text), (form, text)


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": True},
        {"overlap": True, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"overlap": True, "num_kv_cache_blocks": 16},
        {"num_kv_cache_blocks": 16},
    ],
    ids=str,
)
def test_completions_do_not_depend_on_the_schedule(
    options: dict[str, Any], expected: list[list[tuple[str, str | None]]]
) -> None:
    texts, num_preemptions = run(options)
    assert texts == expected
    assert bool(num_preemptions) == ("num_kv_cache_blocks" in options)


@pytest.mark.parametrize("overlap", [False, True])
def test_rows_without_a_grammar_are_not_affected(overlap: bool) -> None:
    params = SamplingParams(seed=5, max_tokens=30, ignore_eos=True)
    prompts = [prompt_of(9, seed=seed) for seed in range(3)]
    with open_llm(TEXT_MODEL, overlap=overlap) as llm:
        alone = [part.token_ids for part in answers(llm, prompts, params)]
        guided = SamplingParams(seed=5, max_tokens=30, structured_outputs=FORMS["schema"])
        together = answers(llm, [*prompts, *prompts], [params] * 3 + [guided] * 3)
    assert [part.token_ids for part in together[:3]] == alone
    assert all(part.text.startswith("{") for part in together[3:])


def test_json_object(llm: LLM) -> None:
    params = SamplingParams(
        seed=1, n=4, max_tokens=200, structured_outputs=StructuredOutputs(json_object=True), logit_bias=closers(llm)
    )
    found = [part for part in answers(llm, ["Hello", "one two"], params) if part.finish_reason == "stop"]
    assert len(found) > 4
    assert all(isinstance(json.loads(part.text), dict) for part in found)


@pytest.mark.parametrize("case", SCHEMAS, ids=lambda case: case["description"])
def test_real_schema_is_refused_by_name_or_enforced(case: dict[str, Any], llm: LLM) -> None:
    schema = case["schema"]
    spec = StructuredOutputs(json=schema)
    params = SamplingParams(seed=7, n=4, max_tokens=120, structured_outputs=spec, logit_bias=closers(llm))
    try:
        found = answers(llm, "Hello", params)
    except RequestError as error:
        assert any(str(key) in str(error) for key in keywords(schema)), error
        return
    done = [json.loads(part.text) for part in found if part.finish_reason == "stop"]
    assert done
    jsonschema.Draft202012Validator.check_schema(schema)
    for value in done:
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
    if case["keyword"] != "date":  # the grammar of a date checks its syntax, not the calendar
        assert not [value for value in case["invalid"] if accepts(llm, spec, value)]


def keywords(schema: Any) -> set[str]:
    if isinstance(schema, dict):
        return set(schema) | {key for value in schema.values() for key in keywords(value)}
    return {key for value in schema for key in keywords(value)} if isinstance(schema, list) else set()


def accepts(llm: LLM, spec: StructuredOutputs, value: Any) -> bool:
    """True if the guide allows every token of the value, and EOS after it."""
    assert llm.tokenizer is not None
    guide = compiler_of(llm).compile(spec).guide()
    mask = guide.mask_after(())
    for token in [*llm.tokenizer.encode(json.dumps(value, ensure_ascii=False), False), 2]:
        if mask is None or not mask[token // 8] >> token % 8 & 1:
            return False
        mask = guide.mask_after([token]) if token != 2 else mask
    return True


def test_sample_has_enough_of_both(llm: LLM) -> None:
    kept = 0
    for case in SCHEMAS:
        try:
            compiler_of(llm).compile(StructuredOutputs(json=case["schema"]))
            kept += 1
        except RequestError:
            pass
    assert kept >= 25 and len(SCHEMAS) - kept >= 3


# --- how completions end ----------------------------------------------------------------------------------------------


def one(llm: LLM, spec: StructuredOutputs, **settings: Any) -> CompletionOutput:
    return answers(
        llm, "Hello", SamplingParams(**{"temperature": 0.0, "max_tokens": 60} | settings, structured_outputs=spec)
    )[0]


def test_complete_grammar_ends_the_completion(llm: LLM) -> None:
    found = one(llm, StructuredOutputs(choice=["yes"]), ignore_eos=True, min_tokens=30)
    assert (found.text, found.finish_reason, found.stop_reason) == ("yes", "stop", None)


def test_ignore_eos_continues_while_possible(llm: LLM) -> None:
    found = one(llm, StructuredOutputs(regex="[ab]{0,9}"), ignore_eos=True)
    assert re.fullmatch("[ab]{9}", found.text) and found.finish_reason == "stop"


def test_min_tokens_continues_while_possible(llm: LLM) -> None:
    bias = {token: 100.0 for token in (0, 2)}
    spec = StructuredOutputs(regex="[ab]{1,9}")
    assert len(one(llm, spec, logit_bias=bias).token_ids) == 2
    assert len(one(llm, spec, logit_bias=bias, min_tokens=4).token_ids) == 5


def test_grammar_overrides_other_restrictions(llm: LLM) -> None:
    spec = StructuredOutputs(choice=["no"])
    assert one(llm, spec, bad_words=["no", "n", "o"], allowed_token_ids=[90, 91]).text == "no"


def test_other_processors_choose_among_the_allowed_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None
    spec = StructuredOutputs(choice=["x1", "x2", "x3"])
    two = llm.tokenizer.encode("2", False)[0]
    assert one(llm, spec, logit_bias={two: 50.0}).text == "x2"
    assert one(llm, spec, logit_bias={two: 50.0}, bad_words=["2"]).text != "x2"


def test_stop_string_applies(llm: LLM) -> None:
    found = one(llm, StructuredOutputs(regex="[0-9]{3}-x{40}"), stop="-")
    assert re.fullmatch("[0-9]{3}", found.text) and found.stop_reason == "-"


def test_length_applies(llm: LLM) -> None:
    found = one(llm, StructuredOutputs(regex="x{40}"), max_tokens=5)
    assert found.finish_reason == "length" and set(found.text) == {"x"}


def test_logprobs_are_the_models_own(llm: LLM) -> None:
    found = one(llm, StructuredOutputs(choice=["yes"]), logprobs=0)
    assert found.logprobs is not None and len(found.logprobs) == len(found.token_ids)
    assert all(next(iter(entry.values())).logprob < -0.01 for entry in found.logprobs)


def test_tokens_that_the_model_lacks_are_never_sampled(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    copytree(TOKENIZER, folder, dirs_exist_ok=True)
    edit_config(folder, lambda config: config.update(eos_token_id=2))
    with open_llm(folder) as llm:
        assert llm.tokenizer is not None and llm.tokenizer.vocab_size > llm.model_config.vocab_size == VOCAB_SIZE
        params = SamplingParams(seed=1, n=3, max_tokens=30, structured_outputs=StructuredOutputs(regex="[a-z ]{5,9}"))
        found = answers(llm, [[5, 6, 7]], params)
    assert all(re.fullmatch("[a-z ]{5,9}", part.text) for part in found)


# --- refusals and failures --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "named"),
    [
        (StructuredOutputs(json={"type": "array", "uniqueItems": True}), "uniqueItems"),
        (
            StructuredOutputs(json={"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}),
            "uniqueItems",
        ),
        (StructuredOutputs(json={"type": "string", "format": "nonsense"}), "nonsense"),
        (StructuredOutputs(json={"type": "object", "minProperties": 2}), "minProperties"),
        (StructuredOutputs(json={"type": "object", "propertyNames": {"maxLength": 3}}), "propertyNames"),
        (StructuredOutputs(json={"properties": {"a": {}}, "propertyNames": {"const": "b"}}), "propertyNames"),
        (StructuredOutputs(json={"const": "a\x01"}), "control character"),
        (StructuredOutputs(json={"type": "string", "pattern": "a\\x01b"}), "control character"),
        (StructuredOutputs(json={"oneOf": [{"multipleOf": 3}, {"multipleOf": 5}]}), "oneOf"),
        (StructuredOutputs(json={"$ref": "https://example.com/schema"}), "example.com"),
        (StructuredOutputs(regex="a(?=b)"), "look-ahead"),
        (StructuredOutputs(regex=r"(a)\1"), "backreferences"),
        (StructuredOutputs(regex="("), "unclosed"),
        (StructuredOutputs(grammar="start: nothing"), "nothing"),
        (StructuredOutputs(grammar="root ::= " + "(" * 20000), "recursion"),
    ],
    ids=str,
)
def test_unsupported_grammar_is_refused_by_name(spec: StructuredOutputs, named: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=re.escape(named)):
        one(llm, spec)
    assert llm.is_finished()


def test_refused_without_a_tokenizer() -> None:
    with open_llm("qwen3") as llm, pytest.raises(RequestError, match="skip_tokenizer_init"):
        llm.generate([[1, 2]], SamplingParams(structured_outputs=FORMS["choice"]), use_tqdm=False)


class FailingGuide:
    """A guide that can compute no mask after a number of tokens."""

    is_over = False

    def __init__(self, last: int) -> None:
        self.num_tokens = 0
        self._last = last

    def mask_after(self, new_tokens: Sequence[int]) -> bytes | None:
        self.num_tokens += len(new_tokens)
        return bytes([255]) * 75 if self.num_tokens <= self._last else None


@pytest.mark.parametrize("overlap", [False, True])
def test_failing_guide_ends_only_its_request(overlap: bool) -> None:
    params = SamplingParams(seed=5, max_tokens=20, ignore_eos=True)
    with open_llm(TEXT_MODEL, overlap=overlap) as llm:
        other = llm.add_request(prompt_of(5), params)
        lost = llm.add_request(prompt_of(6), params)
        scheduler = scheduler_of(llm)
        scheduler.waiting[1].guide = FailingGuide(3)
        outputs = {}
        while not llm.is_finished():
            outputs |= {output.request_id: output.outputs[0] for output in llm.step()}
        check_scheduler(scheduler)
    assert (outputs[lost].finish_reason, len(outputs[lost].token_ids)) == ("error", 4)
    assert (outputs[other].finish_reason, len(outputs[other].token_ids)) == ("length", 20)


def test_batches_without_a_grammar_are_not_asked_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm(TEXT_MODEL, overlap=True) as llm:
        monkeypatch.setattr("nanovllm.engine.guide.step_masks", None)
        answers(llm, ["Hello", "you"], SamplingParams(max_tokens=20))


def test_abort_frees_everything() -> None:
    with open_llm(TEXT_MODEL, overlap=True) as llm:
        name = llm.add_request("Hello", SamplingParams(max_tokens=100, n=2, structured_outputs=FORMS["schema"]))
        for _ in range(7):
            llm.step()
        llm.abort(name)
        assert answers(llm, "Hello", SamplingParams(temperature=0.0, structured_outputs=FORMS["choice"]))[0].text
        scheduler = scheduler_of(llm)
        check_scheduler(scheduler)
        assert scheduler.block_manager.num_available == scheduler.config.num_blocks
