"""Objects with properties are closed: a random model generates only declared keys, each once, and comes to an end."""

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Optional

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanovllm import LLM, SamplingParams
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.server.parsers import forced_call_schema
from nanovllm.structured.closed_objects import close_objects
from tests.helpers import TEXT_MODEL, compiler_of, open_llm
from tests.pydantic_models import Cat, Color, Dog, Short, Small

jsonschema = pytest.importorskip("jsonschema")
pydantic = pytest.importorskip("pydantic")

INT = {"type": "integer", "minimum": 0, "maximum": 99}


def object_of(*names: str, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {name: INT for name in names}, **more}


def with_base(**more: Any) -> dict[str, Any]:
    return {"$defs": {"Base": object_of("a", required=["a"])}, **more}


# name -> (schema, texts that are complete, texts that are refused)
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "plain": (object_of("a", required=["a"]), ['{"a": 1}'], ['{"a": 1, "b"', '{"a": 1, "a"', "{}"]),
    "no properties listed": (object_of(), ["{}"], ['{"a"']),
    "explicitly open": (object_of("a", additionalProperties=True), ['{"a": 1, "b": "x"}'], ['{"a": 1, "a"']),
    "open with a schema": (object_of("a", additionalProperties=INT), ['{"a": 1, "b": 2}'], ['{"b": "x"']),
    "patterns": (
        object_of("a", patternProperties={"^x": INT}),
        ['{"a": 1, "xa": 2}', '{"xa": 2}'],
        ['{"a": 1, "ya"', '{"xa": "'],
    ),
    "any object": ({"type": "object"}, ['{"a": 1, "b": {}}'], []),
    "required but not declared": (object_of("a", required=["b"]), ['{"a": 1, "b": [null]}'], ['{"a": 1}', '{"c"']),
    "inside arrays": (
        {"type": "array", "prefixItems": [object_of("a")], "items": object_of("b")},
        ['[{"a": 1}, {"b": 1}]'],
        ['[{"b"', '[{"a": 1}, {"a"'],
    ),
    "inside additional properties": (
        {"type": "object", "additionalProperties": object_of("a")},
        ['{"x": {"a": 1}}'],
        ['{"x": {"b"'],
    ),
    "anyOf": (
        {"anyOf": [object_of("a", required=["a"]), object_of("b", required=["b"]), {"type": "null"}]},
        ['{"a": 1}', '{"b": 1}', "null"],
        ['{"a": 1, "b"', "{}"],
    ),
    "anyOf beside properties": (
        object_of("k", anyOf=[object_of("x", required=["x"]), object_of("y", required=["y"])]),
        ['{"k": 1, "x": 2}', '{"k": 1, "y": 2}', '{"x": 2}'],
        ['{"k": 1, "x": 2, "y"', '{"k": 1, "z"', "{}"],
    ),
    "anyOf that only requires": (
        object_of("a", "b", anyOf=[{"required": ["a"]}, {"required": ["b"]}]),
        ['{"a": 1}', '{"b": 1}', '{"a": 1, "b": 1}'],
        ["{}", '{"c"'],
    ),
    "oneOf": (
        {
            "oneOf": [
                {"type": "object", "properties": {"k": {"const": name}, name: INT}, "required": ["k"]}
                for name in ("cat", "dog")
            ]
        },
        ['{"k": "cat", "cat": 1}', '{"k": "dog"}'],
        ['{"k": "cat", "dog"'],
    ),
    "allOf": (
        {"allOf": [object_of("a", required=["a"]), object_of("b")]},
        ['{"a": 1, "b": 1}', '{"a": 1}'],
        ['{"b": 1}', '{"a": 1, "c"', '{"a": "'],
    ),
    "allOf beside properties": (
        object_of("c", allOf=[object_of("a"), {"required": ["c"]}]),
        ['{"c": 1}'],
        ["{}", '{"d"'],
    ),
    "allOf with an explicitly open part": (
        {"allOf": [object_of("a", additionalProperties=True), object_of("b")]},
        ['{"a": 1, "b": 1, "c": "x"}'],
        [],
    ),
    "allOf with a closed part": (
        {"allOf": [object_of("a", additionalProperties=False), object_of("b")]},
        ['{"a": 1}'],
        ['{"a": 1, "b"', '{"c"'],
    ),
    "allOf with alternatives inside": (
        {"allOf": [object_of("a"), {"anyOf": [object_of("x", required=["x"]), object_of("y", required=["y"])]}]},
        ['{"a": 1, "x": 1}', '{"a": 1, "y": 1}'],
        ['{"a": 1, "x": 1, "y"', '{"a": 1}'],
    ),
    "reference": (with_base(**{"$ref": "#/$defs/Base"}), ['{"a": 1}'], ['{"a": 1, "b"']),
    "inheritance by allOf": (
        with_base(
            type="object",
            properties={
                "derived": {"allOf": [{"$ref": "#/$defs/Base"}, object_of("b")]},
                "base": {"allOf": [{"$ref": "#/$defs/Base"}], "description": "one branch"},
            },
        ),
        ['{"derived": {"a": 1, "b": 1}, "base": {"a": 1}}'],
        ['{"derived": {"a": 1, "c"', '{"base": {"a": 1, "b"', '{"derived": {"b": 1}'],
    ),
    "reference beside properties": (
        with_base(**{"$ref": "#/$defs/Base"}, **object_of("b")),
        ['{"a": 1, "b": 1}'],
        ['{"b": 1}', '{"a": 1, "c"'],
    ),
    "inheritance over two levels": (
        {
            "$defs": {
                "A": object_of("a"),
                "closed-0": {"allOf": [{"$ref": "#/$defs/A"}, object_of("b")]},
            },
            "allOf": [{"$ref": "#/$defs/closed-0"}, object_of("c", required=["c"])],
        },
        ['{"a": 1, "b": 1, "c": 1}', '{"c": 1}'],
        ['{"a": 1}', '{"a": 1, "d"'],
    ),
    "recursive": (
        {
            "$defs": {"Node": {"type": "object", "properties": {"v": INT, "next": {"$ref": "#/$defs/Node"}}}},
            "$ref": "#/$defs/Node",
        },
        ['{"v": 1, "next": {"v": 1, "next": {}}}'],
        ['{"v": 1, "next": {"w"'],
    ),
    "names that need escaping in a pointer": (
        {
            "definitions": {"a/b~c d[int]": object_of("a")},
            "allOf": [{"$ref": "#/definitions/a~1b~0c%20d%5Bint%5D"}, object_of("b")],
        },
        ['{"a": 1, "b": 1}'],
        ['{"a": 1, "c"'],
    ),
    "properties called like keywords": (
        {"type": "object", "properties": {"properties": object_of("$ref"), "allOf": INT}},
        ['{"properties": {"$ref": 1}, "allOf": 1}'],
        ['{"properties": {"x"'],
    ),
    "values that look like schemas": (
        {"type": "object", "properties": {"a": {"const": {"properties": {}}}}},
        ['{"a": {"properties": {}}}'],
        ['{"a": {"properties": {}, "additionalProperties"'],
    ),
    "names from a list": (
        {
            "$defs": {"Color": {"enum": ["red", "blue"], "type": "string", "title": "Color"}},
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/Color"},
            "additionalProperties": object_of("a"),
            "required": ["blue"],
        },
        ['{"red": {"a": 1}, "blue": {}}', '{"blue": {"a": 1}}'],
        ['{"red": {}}', '{"blue": {}, "blue"', '{"green"', '{"blue": {"b"', '{"blue": 1'],
    ),
    "one name": (
        {"type": "object", "propertyNames": {"const": "x"}},
        ['{"x": [1, {"y": 2}]}', "{}"],
        ['{"y"', '{"x": 1, "x"'],
    ),
    "names from a pattern": (
        {"type": "object", "propertyNames": {"type": "string", "pattern": "^x"}, "additionalProperties": INT},
        ['{"xa": 1, "xb": 2}'],
        ['{"ya"', '{"xa": "'],
    ),
    "tool arguments": (
        forced_call_schema(
            [
                {"type": "function", "function": {"name": name, "parameters": object_of(name, required=[name])}}
                for name in ("add", "sub")
            ],
            "required",
        ),
        ['{"name": "add", "arguments": {"add": 1}}'],
        ['{"name": "add", "arguments": {"add": 1, "sub"', '{"name": "sub", "arguments": {}}'],
    ),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(TEXT_MODEL, max_model_len=512, num_kv_cache_blocks=256) as llm:
        yield llm


def follows(llm: LLM, schema: dict[str, Any], text: str, *, complete: bool) -> bool:
    """True if the grammar allows every token of the text and, for a complete one, the end of sequence after it."""
    assert llm.tokenizer is not None
    guide = compiler_of(llm).compile(StructuredOutputs(json=schema)).guide()
    mask = guide.mask_after(())
    eos = min(llm.llm_engine.eos_token_ids)
    for token in [*llm.tokenizer.encode(text, False), *([eos] if complete else [])]:
        if mask is None or not mask[token // 8] >> token % 8 & 1:
            return False
        mask = guide.mask_after([token]) if token != eos else mask
    return True


@pytest.mark.parametrize("name", CASES)
def test_closed(name: str, llm: LLM) -> None:
    schema, complete, refused = CASES[name]
    for text in complete:
        assert follows(llm, schema, text, complete=True), text
    for text in refused:
        assert not follows(llm, schema, text, complete=text.endswith("}")), text


def test_the_given_schema_is_not_changed() -> None:
    schema, *_ = CASES["inheritance by allOf"]
    before = json.dumps(schema)
    close_objects(schema)
    assert json.dumps(schema) == before


def test_schema_of_a_reference_elsewhere_stays_open() -> None:
    """Its properties are unknown here, so they must not be refused; llguidance refuses the reference by name."""
    schema = {"$ref": "https://example.com/base", **object_of("a")}
    assert close_objects(schema) == schema


# --- pydantic's schemas, generated by a random model ------------------------------------------------------------------


class Address(pydantic.BaseModel):
    street: Short
    zip: Annotated[str, pydantic.Field(pattern=r"^\d{5}$")]


class Person(pydantic.BaseModel):
    """Nested definitions, optional fields, unions, arrays, tuples and an enumeration."""

    age: Small
    home: Address
    work: Optional[Address] = None  # noqa: UP045 - as most of pydantic's users write it
    others: Annotated[list[Address], pydantic.Field(max_length=2)]
    color: Color = Color.RED
    pet: Cat | Dog = pydantic.Field(discriminator="kind")
    second_pet: Cat | Dog | None = None
    pair: tuple[Small, Short]
    scores: dict[Literal["good", "bad"], Small]
    by_color: dict[Color, Address] = {}
    described: Address = pydantic.Field(description="where", title="Described")
    flag: bool


class Tree(pydantic.BaseModel):
    value: Small
    left: "Tree | None" = None


@pytest.mark.parametrize("model", [Person, Tree, Address], ids=lambda model: model.__name__)
@pytest.mark.parametrize("as_tool", [False, True], ids=["schema", "tool"])
def test_random_model_answers_pydantic_schemas(model: Any, as_tool: bool, llm: LLM) -> None:
    schema = parameters = model.model_json_schema()
    if as_tool:
        tool = {"type": "function", "function": {"name": "make", "parameters": parameters}}
        schema = forced_call_schema([tool], "required")
    assert llm.tokenizer is not None
    bias = {"}": 5.0, "]": 5.0, " ": -9.0, "\n": -9.0, "\t": -9.0}  # so that 500 tokens are enough
    params = SamplingParams(
        seed=11,
        n=6,
        max_tokens=500,
        structured_outputs=StructuredOutputs(json=schema),
        logit_bias={token: value for text, value in bias.items() for token in llm.tokenizer.encode(text, False)},
    )
    (output,) = llm.generate("Hello", params, use_tqdm=False)
    assert [part.finish_reason for part in output.outputs] == ["stop"] * 6
    for part in output.outputs:
        value = json.loads(part.text, object_pairs_hook=unique_keys)
        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
        read = model.model_validate(value["arguments"] if as_tool else value, extra="forbid")
        assert set(read.model_fields_set) <= set(model.model_fields)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), f"a key is repeated: {pairs}"
    return dict(pairs)


# --- against JSON Schema's own definition of what is not evaluated ----------------------------------------------------

NAMES = st.sampled_from("abcd")
PLAIN = st.builds(
    lambda names, required, additional: (
        {"properties": {name: {"type": "integer"} for name in names}, "required": sorted(required & set(names))}
        | ({} if additional is None else {"additionalProperties": additional})
    ),
    st.lists(NAMES, max_size=2, unique=True),
    st.sets(NAMES, max_size=2),
    st.sampled_from([None, None, None, None, False, True, {"type": "integer"}]),
)
REFERENCES = st.sampled_from(["#/$defs/x", "#/$defs/y"])


def combined(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(
        lambda own, all_of, any_of, ref: (
            own
            | ({"allOf": all_of} if all_of else {})
            | ({"anyOf": any_of} if any_of else {})
            | ({"$ref": ref} if ref else {})
            or {"properties": {}}
        ),
        PLAIN | st.just({}),
        st.lists(parts, max_size=2),
        st.lists(parts, max_size=2),
        st.none() | REFERENCES,
    )


TREES = combined(st.recursive(PLAIN, combined, max_leaves=4))
DEFINITIONS = st.fixed_dictionaries({"x": PLAIN, "y": PLAIN | st.just({"allOf": [{"$ref": "#/$defs/x"}]})})
OBJECTS = st.dictionaries(NAMES | st.just("e"), st.just(1) | st.just("text"), max_size=4)


@settings(deadline=None, max_examples=100)
@given(tree=TREES, definitions=DEFINITIONS, values=st.lists(OBJECTS, min_size=1, max_size=8))
def test_closed_like_unevaluated_properties(
    tree: dict[str, Any], definitions: dict[str, Any], values: list[dict[str, Any]]
) -> None:
    """A closed schema accepts no property that `unevaluatedProperties: false` refuses. Without `anyOf` they are equal.

    With `anyOf` it may refuse more, because only one of the branches is generated, and accept more if one is open.
    """
    schema = {**tree, "$defs": definitions}
    exact = jsonschema.Draft202012Validator({**schema, "unevaluatedProperties": False})
    closed = jsonschema.Draft202012Validator(close_objects(schema))
    text = json.dumps(schema)
    has_open_branch = "anyOf" in text and any(f'"additionalProperties": {value}' in text for value in ("true", "{"))
    for value in values:
        if not closed.is_valid(value):
            assert "anyOf" in text or not exact.is_valid(value)
        elif not has_open_branch:
            assert exact.is_valid(value)
