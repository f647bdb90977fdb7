"""The compiler of structured outputs: limits on time and memory, sharing between threads, caching and recovery."""

import json
import threading
import time
from collections.abc import Iterator
from functools import reduce
from pathlib import Path

import pytest

from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.structured import compile_sandbox
from nanovllm.structured import grammar as grammar_module
from nanovllm.structured.compiler import Compiler, GrammarCache
from nanovllm.structured.exact import json_or_call
from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TOKENIZER

VOCAB_SIZE = 610  # ten more than the tokenizer has


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(TOKENIZER)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[Compiler]:
    compiler = Compiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids={2, 0})
    yield compiler
    compiler.close()


def allowed(mask: bytes | None) -> set[int]:
    assert mask is not None
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


def test_mask_has_the_allowed_tokens(compiler: Compiler, tokenizer: Tokenizer) -> None:
    guide = compiler.compile(StructuredOutputs(choice=["ab", "a", "cé"])).guide()
    pieces = tokenizer.pieces(skip_special_tokens=False)
    assert {pieces[token] for token in allowed(guide.mask_after(()))} <= {b"a", b"ab", b"c", b"c\xc3", "cé".encode()}
    token = tokenizer.encode("a", False)[0]
    assert {0, 2} < allowed(guide.mask_after([token]))
    assert allowed(guide.mask_after(tokenizer.encode("b", False))) == {0, 2}
    assert guide.num_tokens == 2


NAME = {"type": "object", "properties": {"name": {"const": "f"}}, "required": ["name"]}
ANSWER = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


@pytest.mark.parametrize(
    ("text", "is_free", "is_strict"),
    [
        ('{"answer": 5}', True, True),
        ('<tool_call>\n{"name": "f"}\n</tool_call>', True, True),
        ('<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "f"}</tool_call>', True, True),
        ('<tool_call>{"name": "g"}</tool_call>', True, False),
        ("<tool_call><think>a</think>", True, False),
        ('{"answer": 5}\n<tool_call>{"name": "f"}</tool_call>', False, False),
        ('{"answer": "5"}', False, False),
        ('{"answer": 5, "more": 1}', False, False),
        ('{"name": "f"}', False, False),
        ("Hello", False, False),
    ],
)
def test_json_or_calls(compiler: Compiler, tokenizer: Tokenizer, text: str, is_free: bool, is_strict: bool) -> None:
    """Schemas are closed in such a grammar, too."""
    opener, closer = (tokenizer.backend.token_to_id(tag) for tag in ("<tool_call>", "</tool_call>"))
    assert opener is not None and closer is not None
    for call, expected in ((None, is_free), (NAME, is_strict)):
        guide = compiler.compile(StructuredOutputs(grammar=json_or_call(ANSWER, opener, call, closer))).guide()
        tokens = [*tokenizer.encode(text, False), 2]
        mask, taken = guide.mask_after(()), []
        for token in tokens:
            if token not in allowed(mask):
                break
            taken.append(token)
            mask = guide.mask_after([token])
        assert (taken == tokens) == expected, (call, taken)


def test_padded_ids_are_masked(compiler: Compiler) -> None:
    mask = compiler.compile(StructuredOutputs(regex="(?s:.)*")).guide().mask_after(())
    assert max(allowed(mask)) < 600 and len(allowed(mask)) > 400


HOSTILE = {
    "remainders": StructuredOutputs(json={"type": "integer", "multipleOf": 99999999}),
    "remainders in a grammar": StructuredOutputs(
        grammar='start: <[5]> %json {"type": "integer", "multipleOf": 99999999}'
    ),
    "intersections": StructuredOutputs(
        json={"allOf": [{"type": "string", "pattern": f".*{c}.*"} for c in "abcdefghijklmnopqrst"]}
    ),
    "properties": StructuredOutputs(json={"properties": {f"property{i}": {"type": "integer"} for i in range(6000)}}),
    "alternatives": StructuredOutputs(
        json={"allOf": [{"anyOf": [{"minimum": i}, {"maximum": j}]} for i in range(30) for j in range(30)]}
    ),
    "references": StructuredOutputs(json={"$ref": "#"}),
    "doubling references": StructuredOutputs(
        json={
            "$defs": {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
            | {"d40": {"type": "string"}},
            "$ref": "#/$defs/d0",
        }
    ),
    "combined properties": StructuredOutputs(
        json={"allOf": [{"properties": {f"property{i}": {"type": "integer"}}} for i in range(3000)]}
    ),
    "copied references": StructuredOutputs(
        json={
            "$defs": {"base": {"properties": {f"property{i}": {} for i in range(3000)}}},
            "anyOf": [{"$ref": "#/$defs/base", "properties": {f"own{i}": {}}} for i in range(2000)],
        }
    ),
    "nested names": StructuredOutputs(
        json=reduce(
            lambda inner, _: {
                "propertyNames": {"enum": [f"name{i}" for i in range(200)]},
                "additionalProperties": inner,
            },
            range(8),
            {"type": "integer"},
        )
    ),
    "chain of references": StructuredOutputs(
        json={
            "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)},
            "$ref": "#/$defs/d0",
            "properties": {"a": {}},
        }
    ),
    "circular references": StructuredOutputs(
        json={
            "$defs": {
                "a": {"properties": {"x": {}}, "allOf": [{"$ref": "#/$defs/b"}]},
                "b": {"properties": {"y": {}}, "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#"}]},
            },
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "properties": {"z": {}},
        }
    ),
    "counters": StructuredOutputs(regex="(.{1,50}){1,50}&"),
    "stars": StructuredOutputs(regex="((((.*)*)*)*)*x" * 50),
    "optional": StructuredOutputs(regex="(a?){1000}a{1000}"),
    "parentheses": StructuredOutputs(regex="(" * 4000 + ")" * 4000),
    "ambiguity": StructuredOutputs(grammar='start: x\nx: x x x | x x | "a" | ""'),
    "long rule": StructuredOutputs(grammar="root ::= " + ' "a"' * 15000),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammar_costs_bounded_time(name: str, compiler: Compiler) -> None:
    """The sandbox allows one second of CPU time, and compiling an accepted grammar here takes as long again."""
    began = time.process_time()
    try:
        guide = compiler.compile(HOSTILE[name]).guide()
        for _ in range(20):
            mask = guide.mask_after(())
            if mask is None or allowed(mask) <= {0, 2}:
                break
            guide.mask_after([min(allowed(mask) - {0, 2})])
    except RequestError as error:
        assert len(str(error)) < 400
    assert time.process_time() - began < 5
    assert compiler.compile(StructuredOutputs(choice=[name])), "the next grammar compiles normally"


@pytest.mark.parametrize(
    ("attributes", "named"),
    [
        ("temperature=0.5", "temperature"),
        ("max_tokens=3, temperature=0.5", "temperature"),
        ('stop="]", temperature=0.5', "temperature"),
        ("capture", "capture"),
        ('capture="name"', "capture"),
        ('suffix="b", stop_capture="name"', "stop_capture"),
    ],
)
def test_attribute_without_effect_is_refused_by_name(attributes: str, named: str, compiler: Compiler) -> None:
    for head in (f"number[{attributes}]:", f"  !number [{attributes}] :"):
        with pytest.raises(RequestError, match=f"^grammar: the attribute '{named}'"):
            compiler.compile(StructuredOutputs(grammar=f"start: number\n{head} /[0-9]+/"))


@pytest.mark.parametrize(
    "grammar",
    [
        "start: number\nnumber[max_tokens=3]: /[0-9]+/",
        'start: number\nnumber[stop="capture"]: /[0-9a-z]+/',
        'start: "x[temperature=1]:" number\nnumber: /[0-9]+/',
        'root ::= "a" number\nnumber ::= [capture]',
    ],
)
def test_other_attributes_and_texts_pass(grammar: str, compiler: Compiler) -> None:
    assert compiler.compile(StructuredOutputs(grammar=grammar))


def test_refusal_is_remembered(compiler: Compiler) -> None:
    spec = StructuredOutputs(json={"type": "integer", "multipleOf": 88888889})
    with pytest.raises(RequestError, match="CPU time"):
        compiler.compile(spec)
    began = time.perf_counter()
    with pytest.raises(RequestError, match="CPU time"):
        compiler.compile(spec)
    assert time.perf_counter() - began < 0.5


def test_cache_is_bounded_in_bytes(tokenizer: Tokenizer) -> None:
    compiler = Compiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids={2}, cache_bytes=1 << 20)
    grammars = [compiler.compile(StructuredOutputs(choice=[f"text {i}"])) for i in range(40)]
    cache = compiler._cache
    assert 2 < len(cache) < 20 and cache.num_bytes <= 1 << 20
    assert compiler.compile(StructuredOutputs(choice=["text 39"])) is grammars[39]
    assert compiler.compile(StructuredOutputs(choice=["text 0"])) is not grammars[0]
    guide = compiler.compile(StructuredOutputs(regex="x*")).guide()
    for _ in range(400):
        guide.mask_after(())
    compiler.compile(StructuredOutputs(choice=["another"]))
    assert len(cache) == 1, "a grammar that grew with use evicts the others, and is evicted when it is the oldest"
    compiler.close()


def test_cache_keeps_the_most_recently_used() -> None:
    cache = GrammarCache(40)
    for name in "abc":
        cache.put(("choice", name), "refused")
        cache.get(("choice", "a"))
    assert cache.get(("choice", "a")) == "refused" and cache.get(("choice", "b")) is None


def test_threads_share_a_compiler(compiler: Compiler) -> None:
    found: dict[int, set[int]] = {}

    def work(number: int) -> None:
        for i in range(8):
            compiler.compile(StructuredOutputs(regex=f"{i}-[0-9]+"))
        found[number] = allowed(compiler.compile(StructuredOutputs(regex="[ab]")).guide().mask_after(()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and all(tokens == found[0] for tokens in found.values())


def test_full_lexer_is_recompiled(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """All guides of a grammar share a limited number of lexer states. Reaching the limit must not end a request."""
    monkeypatch.setitem(grammar_module.LIMITS, "max_lexer_states", 600)
    compiler = Compiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids={2})
    grammar = compiler.compile(StructuredOutputs(regex="[a-z]{0,400}X"))
    token = tokenizer.encode("q", False)
    first, second = grammar.guide(), grammar.guide()
    for _ in range(300):
        assert first.mask_after(token) is not None
        assert second.mask_after(token) is not None
    assert first.num_tokens == 300
    compiler.close()


def test_whitespace_is_bounded(compiler: Compiler, tokenizer: Tokenizer) -> None:
    def accepted(text: str) -> bool:
        guide = compiler.compile(StructuredOutputs(json_object=True)).guide()
        return guide.mask_after(tokenizer.encode(text, False)) is not None

    assert accepted(json.dumps({"a": [1, {"b": None}]}, indent=4))
    assert accepted('{"a": 1, "b": 2}') and accepted('{"a":1}')
    assert not accepted("{" + " " * 60) and not accepted("{\n\n\n")


def test_additional_property_cannot_spell_a_declared_one(compiler: Compiler, tokenizer: Tokenizer) -> None:
    schema = {"properties": {"a": {"type": "integer"}}, "type": "object", "additionalProperties": True}
    spec = StructuredOutputs(json=schema)
    assert compiler.compile(spec).guide().mask_after(tokenizer.encode('{"a":1,"b":"x"}', False)) is not None
    for text in ('{"a":1,"\\u0061":"x"', '{"a":1,"a":"x"'):
        assert compiler.compile(spec).guide().mask_after(tokenizer.encode(text, False)) is None


def test_sandbox_restarts_after_its_process_ended(tokenizer: Tokenizer) -> None:
    compiler = Compiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids={2})
    compiler.compile(StructuredOutputs(choice=["a"]))
    process = compiler._sandbox._process
    assert process is not None
    process.kill()
    process.wait()
    compiler.compile(StructuredOutputs(choice=["b"]))
    compiler.close()
    compiler.close()


def test_sandbox_that_does_not_start_says_why(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids={2})
    with monkeypatch.context() as patch:
        patch.setattr(compile_sandbox, "WORKER", tmp_path / "worker.py")
        for text, reason in (("import lacking", "No module named 'lacking'"), ("exit(3)", "exit status 3")):
            (tmp_path / "worker.py").write_text(text)
            with pytest.raises(RequestError, match=f"did not start: .*{reason}"):
                compiler.compile(StructuredOutputs(choice=["a"]))
    assert compiler.compile(StructuredOutputs(choice=["a"]))  # the refusal was not kept
    compiler.close()


def test_model_without_eos_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="end-of-sequence"):
        Compiler(tokenizer, vocab_size=VOCAB_SIZE, eos_token_ids=())
