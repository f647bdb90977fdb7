"""The tokenizer of a GGUF file, against tokenizers, transformers and SentencePiece's definition."""

import json
import math
import os
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter

from nanovllm.checkpoint.gguf_splits import PATTERNS, pre_tokenizer
from nanovllm.checkpoint.gguf_tokenizer import build_tokenizer, chat_template, special_tokens
from nanovllm.errors import CheckpointError

REPOSITORY = Path(__file__).parents[2]

TEXTS = [
    "Hello world, it's 12345 o'clock; we'LL see 3.14159 and 007!",
    "  leading,  double   and trailing spaces  \n\n\t\ttabs\r\n end",
    "naïve café — “quotes” … Ünïcödé, e\u0301 combining",
    "日本語のテキスト、中文文本，한국어 텍스트, العربية, हिन्दी, ไทย",
    "emoji 🎉👩‍👩‍👧‍👦🇫🇷 ½ ² ٣٤٥ Ⅷ",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # comment\n",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think> <|im_start|><|im_start|>",
    "",
    " ",
    "x" * 300,
    "(a)[b]{c}<d>/*e*/ $100.00 @user #tag http://example.org/?q=1&r=2",
]


def byte_level_metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """The metadata that a converter writes for a byte-level tokenizer."""
    state = json.loads(backend.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    texts = {index: token for token, index in state["model"]["vocab"].items()}
    texts |= {index: token["content"] for index, token in added.items()}
    size = max(texts) + 4  # embeddings are padded to a round number
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": [token_type(texts, added, index) for index in range(size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
    }


def token_type(texts: dict[int, str], added: dict[int, Any], index: int) -> int:
    if index in added:
        return 3 if added[index]["special"] else 4
    return 1 if index in texts else 5


def check_equal(ours: tokenizers.Tokenizer, oracle: tokenizers.Tokenizer, texts: list[str]) -> None:
    for value in texts:
        ids = oracle.encode(value, add_special_tokens=False).ids
        assert ours.encode(value).ids == ids, value
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip), value


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    ranges = [(32, 127), (32, 127), (0xA0, 0x2000), (0x3000, 0xD7FF), (0x1F300, 0x1F700), (48, 58), (9, 14)]
    return ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(50))) for _ in range(count)]


def test_qwen2_kind_equals_the_real_qwen3_tokenizer() -> None:
    shared = REPOSITORY.parent / "shared" / "data" / "tokenizers" / "qwen3"
    path = Path(os.environ.get("NANOVLLM_QWEN3_TOKENIZER", shared))
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        pytest.skip("needs the Qwen3 tokenizer: NANOVLLM_QWEN3_TOKENIZER names no tokenizer.json")
    oracle = tokenizers.Tokenizer.from_file(str(path))
    tokenizer = build_tokenizer(byte_level_metadata(oracle, "qwen2"))
    check_equal(tokenizer, oracle, TEXTS + random_texts(500))
    assert tokenizer.get_vocab() == oracle.get_vocab()
    added, expected = tokenizer.get_added_tokens_decoder(), oracle.get_added_tokens_decoder()
    assert {index: str(token) for index, token in added.items()} == {i: str(t) for i, t in expected.items()}


@pytest.fixture(scope="module")
def trained() -> str:
    """A small byte-level BPE with merges across the splits of some pre-tokenizers, so that a wrong split is noticed."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator([text[i : i + 12] for text in TEXTS for i in range(0, len(text), 7)] * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False, special=False)])
    return backend.to_str()


def pre_tokenizer_oracles() -> dict[str, pre_tokenizers.PreTokenizer]:
    llama3 = tokenizers.Regex(TikTokenConverter().pattern)
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(llama3, "isolated"), whole_bytes])
    digits = pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(r"\p{N}"), "isolated"), gpt2])
    like_gpt2, like_smollm = dict.fromkeys(GPT2_KINDS, gpt2), dict.fromkeys(DIGITS_KINDS, digits)
    return like_gpt2 | like_smollm | dict.fromkeys(LLAMA3_KINDS, split)


GPT2_KINDS, DIGITS_KINDS = ("gpt-2", "olmo"), ("smollm", "refact")
LLAMA3_KINDS = ("llama-bpe", "llama3", "lfm2", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe")


@pytest.mark.parametrize("pre", [*GPT2_KINDS, *DIGITS_KINDS, *LLAMA3_KINDS])
def test_byte_level_kinds(trained: str, pre: str) -> None:
    oracle = tokenizers.Tokenizer.from_str(trained)
    metadata = byte_level_metadata(oracle, pre)
    oracle.pre_tokenizer = pre_tokenizer_oracles()[pre]
    if pre.startswith("llama") or pre == "lfm2":
        oracle.model.ignore_merges = True
    check_equal(build_tokenizer(metadata), oracle, TEXTS + random_texts(200))


KINDS_OF_TRANSFORMERS = ("gpt-4o", "tekken", "deepseek-r1-qwen", "megrez", "falcon3", "pixtral")


@pytest.mark.parametrize("pre", KINDS_OF_TRANSFORMERS)
def test_kinds_whose_pattern_transformers_has(trained: str, pre: str) -> None:
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    oracle = tokenizers.Tokenizer.from_str(trained)
    ours = build_tokenizer(byte_level_metadata(oracle, pre))
    split = pre_tokenizers.Split(tokenizers.Regex(module.GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    oracle.pre_tokenizer = pre_tokenizers.Sequence([split, whole_bytes])
    oracle.model.ignore_merges = pre in ("tekken", "falcon3", "pixtral")
    check_equal(ours, oracle, [*TEXTS, "camelCaseWord's HTMLPage", *random_texts(200)])


def test_a_change_of_case_begins_a_word(trained: str) -> None:
    backend = tokenizers.Tokenizer.from_str(trained)
    for pre, pieces in {"gpt-4o": ["camel", "Case's"], "tekken": ["camel", "Case", "'s"]}.items():
        ours = build_tokenizer(byte_level_metadata(backend, pre))
        assert [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("camelCase's")] == pieces


PIECES = json.loads((Path(__file__).parent / "data" / "llama_cpp_pieces.json").read_text())


@pytest.mark.parametrize("kind", PIECES["kinds"], ids=lambda kind: kind["names"][0])
def test_pieces_are_those_of_llama_cpp(kind: dict[str, Any]) -> None:
    """llama.cpp (xllamacpp 2026.10.11549) tokenized these texts with a vocabulary of all their substrings and all
    merges, so that its tokens are the pieces. The data has where it cut. Of gpt-4o and tekken llama.cpp knows the
    case of a to z only; these are compared with transformers above."""
    for name in kind["names"]:
        splitter = pre_tokenizer(name)
        for text, cuts in zip(PIECES["texts"], kind["cuts"], strict=True):
            ends = [end for _, (_, end) in splitter.pre_tokenize_str(text)]
            assert ends == [*cuts, len(text)], (name, text)


def test_every_kind_is_compared_with_llama_cpp() -> None:
    compared = {name for kind in PIECES["kinds"] for name in kind["names"]}
    assert compared | {"gpt-4o", "tekken"} == set(PATTERNS)


def gemma4_metadata(**changes: Any) -> dict[str, Any]:
    """A vocabulary in the form of Gemma's, trained on `TEXTS`; some of their characters have no token."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    backend.normalizer = tokenizers.normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("\n+"), "isolated")
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|tool_call>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, limit_alphabet=90, show_progress=False
    )
    backend.train_from_iterator(TEXTS * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, 2] + [6] * 256 + [4] + [1] * (len(tokens) - 261),
        "tokenizer.ggml.scores": [-1000.0] * len(tokens),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.unknown_token_id": 3,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def test_gemma4_equals_transformers() -> None:
    module = pytest.importorskip("transformers.integrations.gguf.gguf_tokenizer_mapping")
    metadata = gemma4_metadata()
    keys = ("tokens", "token_type", "merges")
    described = {"tokenizer_type": "gemma4"} | {key: metadata[f"tokenizer.ggml.{key}"] for key in keys}
    oracle, _ = module.convert_gguf_tokenizer("gemma4", described)
    tokenizer = build_tokenizer(metadata)
    check_equal(tokenizer, oracle, [*TEXTS, "\n\n\n a<|tool_call>b <eos>", *random_texts(200)])
    assert tokenizer.encode(" a  b").ids == tokenizer.encode("▁a▁▁b").ids
    for flag in ({}, {"add_bos_token": False}):  # llama.cpp adds BOS in any case
        assert special_tokens(gemma4_metadata(**flag))["add_bos_token"] is True


def test_qwen35_kind(trained: str) -> None:
    """The pattern is that of transformers; letters are followed by marks in it."""
    module = pytest.importorskip("transformers.models.qwen3_5.tokenization_qwen3_5")
    oracle = tokenizers.Tokenizer.from_str(trained)
    metadata = byte_level_metadata(oracle, "qwen35")
    split = pre_tokenizers.Split(tokenizers.Regex(module.PRETOKENIZE_REGEX), "isolated")
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    oracle.pre_tokenizer = pre_tokenizers.Sequence([split, whole_bytes])
    oracle.normalizer = tokenizers.normalizers.NFC()
    ours = build_tokenizer(metadata)
    check_equal(ours, oracle, [*TEXTS, "\u0928\u092e\u0938\u094d\u0924\u0947", *random_texts(200)])
    assert len(ours.pre_tokenizer.pre_tokenize_str("\u0928\u092e\u0938\u094d\u0924\u0947")) == 1


def test_how_numbers_are_split(trained: str) -> None:
    expected = {
        "gpt-2": ["1234567"],
        "smollm": list("1234567"),
        "llama-bpe": ["123", "456", "7"],
        "qwen2": list("1234567"),
    }
    for pre, pieces in expected.items():
        tokenizer = build_tokenizer(byte_level_metadata(tokenizers.Tokenizer.from_str(trained), pre))
        assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("1234567")] == pieces


def test_qwen2_normalizes_and_others_do_not(trained: str) -> None:
    backend = tokenizers.Tokenizer.from_str(trained)
    composed = {
        pre: build_tokenizer(byte_level_metadata(backend, pre)) for pre in ("qwen2", "llama-bpe", "smollm", "gpt-2")
    }
    same = {pre: t.encode("e\u0301").ids == t.encode("\u00e9").ids for pre, t in composed.items()}
    assert same == {"qwen2": True, "llama-bpe": False, "smollm": False, "gpt-2": False}


def test_llama3_takes_a_whole_word_that_no_merge_makes(trained: str) -> None:
    metadata = byte_level_metadata(tokenizers.Tokenizer.from_str(trained), "llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ["Qwertz"]
    metadata["tokenizer.ggml.token_type"] += [1]
    assert build_tokenizer(metadata).encode("Qwertz").tokens == ["Qwertz"]
    assert len(build_tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("Qwertz").tokens) > 1


SENTENCEPIECE = ["▁", "a", "b", "c", "▁a", "ab", "aa", "ba", "▁ab", "aab", "aaa", "bc", "abc", "▁▁", "é", "\n"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[INST]", *SENTENCEPIECE]
    types = [2, 3, 3] + [6] * 256 + [4] + [1] * len(SENTENCEPIECE)
    order = [4, 9, 5, 12, 8, 11, 6, 7, 13, 10]  # the order of merges
    scores = [0.0] * 260 + [-float(order.index(i)) if i in order else -100.0 - i for i in range(len(SENTENCEPIECE))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentencepiece_encode(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece's definition: merge the neighbours whose piece has the highest score, leftmost first."""
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list(("▁" + text).replace(" ", "▁"))
    while True:
        pairs = [
            (score[a + b], -i) for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in score
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = [[s] if s in score else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [piece for pieces in known for piece in pieces]


def test_sentencepiece_merges_by_score() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata)
    rng = random.Random(0)
    texts = ["".join(rng.choice("aabbc  é\nz🎉") for _ in range(rng.randrange(1, 20))) for _ in range(400)]
    for value in texts:
        encoded = tokenizer.encode(value)
        assert encoded.tokens == sentencepiece_encode(value, metadata), value
        assert tokenizer.decode(encoded.ids) == value


def test_sentencepiece_around_special_tokens() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata())
    encoded = tokenizer.encode("<s>[INST]ab</s>")
    assert encoded.tokens == ["<s>", "[INST]", "▁ab", "</s>"]
    assert tokenizer.decode(encoded.ids) == "[INST] ab"
    bare = build_tokenizer(sentencepiece_metadata(add_space_prefix=False))
    assert bare.encode("ab").tokens == ["ab"]
    assert bare.decode(bare.encode(" ab").ids) == " ab"


def test_sentencepiece_with_tokens_of_white_space() -> None:
    """Gemma's: runs of spaces and of newlines are tokens that are matched before anything is merged."""
    metadata = sentencepiece_metadata(add_space_prefix=False)
    added = {"tokens": ["  ", "   ", "\n\n"], "token_type": [4, 4, 4], "scores": [0.0, 0.0, 0.0]}
    for key, values in added.items():
        metadata[f"tokenizer.ggml.{key}"] = metadata[f"tokenizer.ggml.{key}"] + values
    tokenizer = build_tokenizer(metadata)
    encoded = tokenizer.encode("ab   ab\n\nc\na  c d")
    assert encoded.tokens == ["ab", "   ", "ab", "\n\n", "c", "\n", "a", "  ", "c", "▁", "<0x64>"]
    assert tokenizer.decode(encoded.ids) == "ab   ab\n\nc\na  c d"


def test_roles_of_tokens(trained: str) -> None:
    assert special_tokens(sentencepiece_metadata()) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
    }
    assert special_tokens(sentencepiece_metadata(add_bos_token=False))["add_bos_token"] is False
    byte_level = byte_level_metadata(tokenizers.Tokenizer.from_str(trained), "llama-bpe")
    assert special_tokens(byte_level) == {"add_bos_token": False}
    byte_level["tokenizer.ggml.bos_token_id"] = 1
    assert special_tokens(byte_level) == {"bos_token": "<|im_end|>", "add_bos_token": True}
    assert special_tokens(byte_level | {"tokenizer.ggml.pre": "qwen2"})["add_bos_token"] is False


def test_chat_template() -> None:
    assert chat_template({"tokenizer.chat_template": "{{ messages }}"}) == "{{ messages }}"
    assert chat_template({}) is None
    with pytest.raises(CheckpointError, match="chat_template is of type int"):
        chat_template({"tokenizer.chat_template": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are 'gpt2', 'llama' and 'gemma4'"),
        ({"model": "gpt2", "pre": "kimi-k2"}, "pre-tokenizer .* 'kimi-k2' is not supported; supported are: default"),
        ({"model": "gemma4"}, "tokenizer.ggml.merges is missing"),
        ({"model": "gpt2", "pre": None}, "pre-tokenizer .* None is not supported"),
        ({"model": "gpt2", "pre": "gpt-2"}, "tokenizer.ggml.merges is missing"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a zz"]}, "its 1 merges do not fit its vocabulary"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a b c"]}, "its 1 merges do not fit its vocabulary"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is of type list; it must be a list of str"),
        ({"token_type": [1]}, "there are 1 token types for 276 tokens"),
        ({"token_type": [7] * 276}, r"token types \[7\] are unknown"),
        ({"token_type": [5] * 276}, "the unknown token 0 is marked as unused"),
        ({"scores": [0.0]}, "there are 1 scores for 276 tokens"),
        ({"scores": [math.nan] * 276}, "a score is not a finite number"),
        ({"tokens": ["same"] * 276}, "token 'same' occurs twice, as 0 and as 1"),
        ({"tokens": [str(i) * 400 for i in range(276)]}, "token 100 has 1200 characters; at most 1024"),
        ({"unknown_token_id": 276}, "unknown_token_id is 276; it must be a token id below 276"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1; it must be true or false"),
    ],
)
def test_tokenizers_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(sentencepiece_metadata(**changes))
