"""Incremental text against `tokenizers`' own decoding and against plain searches in the whole text."""

import codecs
import itertools
import os
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from nanovllm.errors import RequestError
from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.tokenizer import Tokenizer

TESTS = Path(__file__).parent.parent
QWEN3 = Path(os.environ.get("NANOVLLM_QWEN3_TOKENIZER") or TESTS.parent.parent / "shared/data/tokenizers/qwen3")

TEXTS = [
    "Natalia sold 48 clips, and then half as many.  Two spaces,\n\n\ttabs.",
    "你好世界，你们好。今天天气很好！ Привет, мир! नमस्ते दुनिया",
    "🙂🙃😀🚀 👩‍👩‍👧‍👦 café, naïve, Straße",
    "def f(x):\n    return x ** 2  # <b>&amp;</b>",
]


def small_tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(TESTS / "data" / "tokenizer")


def sentencepiece_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """Like Llama 2's: "▁" for a space, and one token per byte for text without other tokens."""
    words = ["▁", "▁▁", "▁Hello", "▁world", "Hello", "wor", "ld", "▁a", "a", "b", ",", "é", "你", "x▁y", "▁<", ">"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.add_tokens([AddedToken("<two words>", special=False)])
    backend.decoder = decoder
    return Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})


def letters_tokenizer() -> Tokenizer:
    """Few letters, so that random tokens often contain stop strings; "é" is one token or two byte tokens."""
    tokens = ["a", "b", "c", "ab", "ba", "abc", "bcab", "Ã", "©", "Ã©", "aÃ", "©b", "<end>"]
    backend = Backend(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return Tokenizer(backend)


REPLACE, BYTES, FUSE, STRIP = (
    decoders.Replace("▁", " "),
    decoders.ByteFallback(),
    decoders.Fuse(),
    decoders.Strip(" ", 1, 0),
)
SMALL = small_tokenizer()
LETTERS = letters_tokenizer()
SENTENCEPIECE = {
    "llama": sentencepiece_tokenizer(decoders.Sequence([REPLACE, BYTES, FUSE, STRIP])),
    "gemma": sentencepiece_tokenizer(decoders.Sequence([REPLACE, BYTES, FUSE])),
    "late replace": sentencepiece_tokenizer(decoders.Sequence([BYTES, FUSE, REPLACE, STRIP])),
    "metaspace and bytes": sentencepiece_tokenizer(decoders.Sequence([decoders.Metaspace(), BYTES])),
    "bytes and metaspace": sentencepiece_tokenizer(decoders.Sequence([BYTES, decoders.Metaspace(), FUSE])),
    "metaspace": sentencepiece_tokenizer(decoders.Metaspace()),
    "metaspace, no prefix": sentencepiece_tokenizer(decoders.Metaspace(prepend_scheme="never")),
}
TOKENIZERS = {"byte-level": SMALL, "letters": LETTERS, **SENTENCEPIECE}

each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
each_sentencepiece = pytest.mark.parametrize("tokenizer", SENTENCEPIECE.values(), ids=SENTENCEPIECE.keys())


def draw_ids(data: st.DataObject, tokenizer: Tokenizer, **sizes: int) -> list[int]:
    beyond = 3  # ids of a padded vocabulary, which have no token
    return data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1 + beyond), **sizes), label="ids")


def draw_chunks(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)), label="cuts"))
    return [ids[start:end] for start, end in itertools.pairwise([0, *cuts, len(ids)])]


def tokens_of(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> list[str]:
    skipped = tokenizer.all_special_ids if skip_special_tokens else frozenset()
    return [token for i in ids if i not in skipped and (token := tokenizer.id_to_token(i)) is not None]


def byte_runs(tokens: list[str]) -> list[bytes]:
    """The runs of byte tokens, each as bytes."""
    grouped = itertools.groupby(tokens, key=lambda token: token.startswith("<0x"))
    return [bytes(int(token[3:5], 16) for token in run) for is_bytes, run in grouped if is_bytes]


def spoils_good_characters(run: bytes) -> bool:
    """Whether `tokenizers`, which decodes a run as a whole, loses complete characters of it."""
    return bool(run.decode("utf-8", "ignore")) and "\ufffd" in run.decode("utf-8", "replace")


def equals_library(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool) -> bool:
    """Compare all sequences, except the case named in the module's docstring."""
    has_byte_tokens = "ByteFallback" in repr(tokenizer.backend.decoder)
    runs = byte_runs(tokens_of(tokenizer, ids, skip_special_tokens)) if has_byte_tokens else []
    return not any(spoils_good_characters(run) for run in runs)


# ---- the text of all tokens ----


@each_tokenizer
@pytest.mark.parametrize("skip_special_tokens", [True, False])
@given(data=st.data())
def test_any_tokens_in_any_chunks(tokenizer, skip_special_tokens, data):
    ids = draw_ids(data, tokenizer, max_size=24)
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    seen = ""
    for chunk in draw_chunks(data, ids):
        assert detokenizer.append(chunk) is None
        assert detokenizer.text.startswith(seen)
        seen = detokenizer.text
    detokenizer.finish()
    assert detokenizer.text.startswith(seen)
    assert detokenizer.num_tokens == len(ids)
    assert detokenizer.text == tokenizer.pieces(skip_special_tokens).text([], ids)
    if equals_library(tokenizer, ids, skip_special_tokens):
        assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens)


@given(data=st.data())
def test_what_is_taken_adds_up_and_is_not_kept(data):
    ids = draw_ids(data, SMALL, max_size=24)
    whole, taken = Detokenizer(SMALL), Detokenizer(SMALL)
    text = ""
    for chunk in draw_chunks(data, ids):
        whole.append(chunk)
        taken.append(chunk)
        text += taken.take_new()
        assert text == whole.text and taken.take_new() == taken.text == ""
    whole.finish()
    taken.finish()
    assert text + taken.take_new() == whole.text


@given(data=st.data())
def test_every_whole_character_is_shown_at_once(data):
    ids = draw_ids(data, SMALL, max_size=24)
    detokenizer = Detokenizer(SMALL)
    reference = codecs.getincrementaldecoder("utf-8")("replace")
    byte_of = {char: byte for byte, char in enumerate_byte_alphabet()}
    expected = ""
    for i, token_id in enumerate(ids):
        detokenizer.append([token_id])
        for token in tokens_of(SMALL, [token_id], True):
            expected += reference.decode(bytes(byte_of[char] for char in token))
        assert detokenizer.text == expected
        # Two bad bytes are held back only for half a surrogate, which Python rejects at its third byte.
        assert SMALL.decode(ids[: i + 1]) in (expected, expected + "\ufffd", expected + "\ufffd\ufffd")


def enumerate_byte_alphabet():
    """(byte, its character in a byte-level vocabulary): a character of the alphabet below 256 is its own byte."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(char for char in alphabet if ord(char) > 255))
    for byte in range(256):
        yield byte, chr(byte) if chr(byte) in alphabet else next(others)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", ["small", "qwen3"])
def test_stream_equals_decode_stream(name, text):
    if name == "qwen3" and not QWEN3.is_dir():
        pytest.skip("needs the Qwen3 tokenizer: set NANOVLLM_QWEN3_TOKENIZER to its folder")
    tokenizer = SMALL if name == "small" else Tokenizer.from_dir(QWEN3)
    detokenizer = Detokenizer(tokenizer)
    stream = DecodeStream(skip_special_tokens=True)
    expected = ""
    for token_id in tokenizer.encode(text + "<|im_end|>" + text):
        new = stream.step(tokenizer.backend, token_id)
        expected += new or ""
        detokenizer.append([token_id])
        # The library holds back a whole token that ends inside a character; we hold back only that character.
        assert detokenizer.text == expected if new else detokenizer.text.startswith(expected)
    assert detokenizer.text == text + text


def test_character_over_several_tokens():
    ids = SMALL.encode("a🦀b")
    assert len(ids) == 5  # three of them are the crab
    detokenizer = Detokenizer(SMALL)
    seen = [(detokenizer.append([token_id]), detokenizer.text)[1] for token_id in ids]
    assert seen == ["a", "a", "a", "a🦀", "a🦀b"]


def test_unfinished_character_shows_at_the_end_only():
    ids = SMALL.encode("a🚀")[:-1]
    detokenizer = Detokenizer(SMALL)
    detokenizer.append(ids)
    assert detokenizer.text == "a"
    detokenizer.finish()
    assert detokenizer.text == SMALL.decode(ids) == "a\ufffd"


def test_bytes_that_can_become_no_character_show_as_soon_as_that_is_known():
    lead, letter = SMALL.backend.token_to_id("å"), SMALL.backend.token_to_id("a")
    detokenizer = Detokenizer(SMALL)
    detokenizer.append([lead])
    assert detokenizer.text == ""
    detokenizer.append([lead])
    assert detokenizer.text == "\ufffd"
    detokenizer.append([letter])
    assert detokenizer.text == SMALL.decode([lead, lead, letter]) == "\ufffd\ufffda"


def test_special_tokens_inside_a_character():
    start, *rest = SMALL.encode("🚀")
    eos = SMALL.eos_token_id
    for skip in (True, False):
        ids = [start, eos, *rest, eos]
        assert SMALL.pieces(skip).text([], ids) == SMALL.decode(ids, skip)
    assert SMALL.pieces(True).text([], ids) == "🚀"


# ---- byte fallback, spaces and the prompt ----


def ids_of(tokenizer: Tokenizer, *tokens: str | bytes) -> list[int]:
    """Ids of tokens; bytes become byte tokens."""
    spelled = [[f"<0x{byte:02X}>" for byte in token] if isinstance(token, bytes) else [token] for token in tokens]
    return [tokenizer.backend.token_to_id(token) for token in itertools.chain.from_iterable(spelled)]


def test_good_characters_of_a_byte_run_stay():
    tokenizer = SENTENCEPIECE["llama"]
    ids = ids_of(tokenizer, "Hello", "好🚀".encode(), "界".encode()[:2])
    detokenizer = Detokenizer(tokenizer)
    for token_id in ids[:-2]:
        detokenizer.append([token_id])
    assert detokenizer.text == "Hello好🚀"
    detokenizer.append(ids[-2:])
    detokenizer.finish()
    assert detokenizer.text == tokenizer.pieces(True).text([], ids) == "Hello好🚀\ufffd\ufffd"
    assert tokenizer.decode(ids) == "Hello" + 9 * "\ufffd"


@each_sentencepiece
@given(data=st.data())
@example(data=None)
def test_completion_continues_the_prompt(tokenizer, data):
    prompt = ids_of(tokenizer, "<s>", "▁Hello", ",") if data is None else draw_ids(data, tokenizer, max_size=6)
    ids = ids_of(tokenizer, "▁world") if data is None else draw_ids(data, tokenizer, max_size=8)
    for skip in (True, False):
        between = ids_of(tokenizer, "a")  # no run of bytes crosses the boundary
        before = tokenizer.decode(prompt + between, skip)
        if not equals_library(tokenizer, prompt + between + ids, skip):
            continue
        expected = tokenizer.decode(prompt + between + ids, skip)[len(before) :]
        assert tokenizer.pieces(skip).text(prompt + between, ids) == expected
        detokenizer = Detokenizer(tokenizer, prompt_token_ids=prompt + between, skip_special_tokens=skip)
        detokenizer.append(ids)
        detokenizer.finish()
        assert detokenizer.text == expected


@pytest.mark.parametrize(
    "prompt, skip, text", [([], True, "Hello"), (["<s>"], True, "Hello"), (["<s>"], False, " Hello")]
)
@pytest.mark.parametrize("name", ["llama", "metaspace"])
def test_first_space_goes_only_where_the_text_begins(name, prompt, skip, text):
    tokenizer = SENTENCEPIECE[name]
    prompt_ids, ids = ids_of(tokenizer, *prompt), ids_of(tokenizer, "▁Hello")
    stream = DecodeStream(prompt_ids, skip_special_tokens=skip)
    assert stream.step(tokenizer.backend, ids[0]) == text
    assert tokenizer.pieces(skip).text(prompt_ids, ids) == text


@pytest.mark.parametrize("stop", [(), ("zzz",)])
def test_prompt_that_ends_inside_a_character_does_not_leak(stop):
    prompt, ids = SMALL.encode("secret 🚀")[:-1], SMALL.encode("🚀")[-1:] + SMALL.encode("b")
    detokenizer = Detokenizer(SMALL, prompt_token_ids=prompt, stop=stop)
    detokenizer.append(ids)
    detokenizer.finish()
    assert detokenizer.text == SMALL.decode(ids)
    assert "secret" not in detokenizer.text


# ---- stop strings ----

stop_strings = st.lists(st.text("aabbcé", min_size=1, max_size=5), min_size=1, max_size=4)


def whole_characters(ids: list[int]) -> str:
    detokenizer = Detokenizer(LETTERS)
    detokenizer.append(ids)
    return detokenizer.text


def find_stop(ids: list[int], stops: list[str], min_tokens: int) -> tuple[int, int, str] | None:
    """At the first token that completes a stop string: (tokens up to it, where the earliest starts, which it is)."""
    for num_tokens in range(min_tokens + 1, len(ids) + 1):
        old, text = whole_characters(ids[: num_tokens - 1]), whole_characters(ids[:num_tokens])
        starts = [(start, order) for order, stop in enumerate(stops) for start in completed(stop, old, text)]
        if starts:
            start, order = min(starts)
            return num_tokens, start, stops[order]
    return None


def completed(stop: str, old: str, text: str) -> list[int]:
    return [i for i in range(len(text)) if text.startswith(stop, i) and i + len(stop) > len(old)]


def num_held(text: str, stops: list[str]) -> int:
    lengths = {length for stop in stops for length in range(len(stop)) if text.endswith(stop[:length])}
    return max(lengths)


@settings(max_examples=400)
@given(data=st.data(), stops=stop_strings, min_tokens=st.integers(0, 4), include=st.booleans())
def test_stop_strings_against_a_plain_search(data, stops, min_tokens, include):
    ids = draw_ids(data, LETTERS, max_size=20)
    detokenizer = Detokenizer(LETTERS, stop=stops, min_tokens=min_tokens, include_stop_str_in_output=include)
    expected = find_stop(ids, stops, min_tokens)
    num_fed, hit, seen = 0, None, ""
    for chunk in draw_chunks(data, ids):
        hit = detokenizer.append(chunk)
        num_fed += len(chunk)
        assert detokenizer.text.startswith(seen)
        seen = detokenizer.text
        if hit is not None:
            break
        text = whole_characters(ids[:num_fed])
        assert seen == text[: len(text) - num_held(text, stops)]
    detokenizer.finish()
    assert hit == (expected[2] if expected else None)
    if expected is None:
        assert detokenizer.text == LETTERS.decode(ids)
        assert detokenizer.num_tokens == len(ids)
        return
    num_tokens, start, stop = expected
    assert detokenizer.num_tokens == num_tokens <= num_fed
    end = start + len(stop) if include else start
    assert detokenizer.text == whole_characters(ids[:num_tokens])[:end]


@pytest.mark.parametrize("include, expected", [(False, "The answer"), (True, "The answer is ")])
def test_stop_string_over_several_tokens(include, expected):
    ids = SMALL.encode("The answer is 42")
    detokenizer = Detokenizer(SMALL, stop=[" is ", "never"], include_stop_str_in_output=include)
    shown = []
    for token_id in ids:
        hit = detokenizer.append([token_id])
        shown.append(detokenizer.text)
        if hit:
            break
    assert hit == " is "
    assert detokenizer.text == expected
    assert detokenizer.num_tokens == SMALL.encode("The answer is 4").index(SMALL.encode("4")[0])
    assert all(" is" not in text for text in shown[:-1])


def test_held_back_text_is_shown_at_the_end():
    detokenizer = Detokenizer(SMALL, stop=["day."])
    detokenizer.append(SMALL.encode("a day"))
    assert detokenizer.text == "a "
    detokenizer.finish()
    assert detokenizer.text == "a day"


def test_nothing_follows_a_stop_string():
    ids = SMALL.encode("one STOP two")
    detokenizer = Detokenizer(SMALL, stop=["STOP"])
    assert detokenizer.append(ids) == "STOP"
    assert detokenizer.num_tokens < len(ids)
    detokenizer.finish()
    assert detokenizer.text == "one "


def test_the_earliest_stop_string_wins_then_the_first_named():
    (abc,) = ids_of(LETTERS, "abc")
    for stops, hit, text in [(["c", "bc"], "bc", "a"), (["ab", "abc"], "ab", ""), (["abc", "ab"], "abc", "")]:
        detokenizer = Detokenizer(LETTERS, stop=stops)
        assert detokenizer.append([abc]) == hit
        assert detokenizer.text == text


def test_stop_string_inside_a_byte_run_is_found_at_its_last_byte():
    tokenizer = SENTENCEPIECE["llama"]
    ids = ids_of(tokenizer, "a", "好🚀界".encode())
    detokenizer = Detokenizer(tokenizer, stop=["🚀"])
    assert detokenizer.append(ids) == "🚀"
    assert detokenizer.num_tokens == 1 + 3 + 4
    assert detokenizer.text == "a好"


def test_special_tokens_are_stop_strings_when_they_are_text():
    ids = SMALL.encode("a<|im_end|>b")
    shown, skipped = (Detokenizer(SMALL, stop=["<|im_end|>"], skip_special_tokens=skip) for skip in (False, True))
    assert shown.append(ids) == "<|im_end|>"
    assert shown.text == "a"
    assert skipped.append(ids) is None
    assert skipped.text == "ab"


def test_min_tokens():
    a, b = ids_of(LETTERS, "a", "b")
    detokenizer = Detokenizer(LETTERS, stop=["ab"], min_tokens=3)
    assert detokenizer.append([a, b, a]) is None  # "ab" of the first two is text
    assert detokenizer.text == "ab"
    assert detokenizer.append([b, a]) == "ab"  # begun within the first three, complete after
    assert (detokenizer.text, detokenizer.num_tokens) == ("ab", 4)


def test_min_tokens_counts_the_token_that_completes_the_stop_string():
    a, b = ids_of(LETTERS, "a", "b")
    assert Detokenizer(LETTERS, stop=["ab"], min_tokens=1).append([a, b]) == "ab"
    assert Detokenizer(LETTERS, stop=["ab"], min_tokens=2).append([a, b]) is None


def test_stop_string_that_overlaps_one_within_min_tokens():
    a, b = ids_of(LETTERS, "a", "b")
    detokenizer = Detokenizer(LETTERS, stop=["aba"], min_tokens=3)
    assert detokenizer.append([a, b, a]) is None
    assert detokenizer.text == "ab"
    assert detokenizer.append([b, a]) == "aba"
    assert (detokenizer.text, detokenizer.num_tokens) == ("ab", 5)


def test_empty_stop_string_is_refused():
    with pytest.raises(RequestError, match="stop contains an empty string"):
        Detokenizer(SMALL, stop=["", "a"])


@pytest.mark.parametrize("stop", [(), ("a" * 2000 + "b",)], ids=["none", "long"])
def test_cost_does_not_grow_with_the_text(stop):
    (token,) = ids_of(LETTERS, "a")
    detokenizer = Detokenizer(LETTERS, stop=stop)

    def seconds(num_tokens: int) -> float:
        start = time.perf_counter()
        for _ in range(num_tokens):
            detokenizer.append([token])
        return time.perf_counter() - start

    seconds(4000)
    early = min(seconds(2000) for _ in range(7))
    seconds(60_000)
    late = min(seconds(2000) for _ in range(7))
    assert late < 5 * early
