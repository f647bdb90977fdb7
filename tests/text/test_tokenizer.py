"""The tokenizer against transformers, with a small vocabulary and, where available, with Qwen3's."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.errors import CheckpointError, RequestError
from nanovllm.text.tokenizer import Tokenizer
from tests.text.tokenizer_files import REPOSITORY, SMALL, edit_json

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\tand a tab\r\n\n\nlines  ",
    "Natalia sold 48 clips in April, and then 1/2 as many: 48+24=72.",
    "你好世界，今天天气很好！",
    "Привет, мир! नमस्ते दुनिया こんにちは 안녕하세요 مرحبا",
    "🙂🙃😀🚀 👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301 \u00e9 ﬁ \ufffd \x00",
    "def f(x: int) -> int:\n    return {'a': x ** 2}['a']  # <b>&amp;</b>\n",
    "<|im_start|>user\nhi<|im_end|>\n<think>\n\n</think><tool_call> <|endoftext|>",
]


# ---- text and ids ----


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_encode_equals_transformers(pair, add_special_tokens):
    ours, theirs = pair
    expected = [theirs.encode(text, add_special_tokens=add_special_tokens) for text in TEXTS]
    assert [ours.encode(text, add_special_tokens) for text in TEXTS] == expected
    assert ours.encode_batch(TEXTS, add_special_tokens) == expected


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_decode_equals_transformers(pair, skip_special_tokens):
    ours, theirs = pair
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.decode(ids, skip_special_tokens) == theirs.decode(ids, skip_special_tokens=skip_special_tokens)


def test_vocabulary_equals_transformers(pair):
    ours, theirs = pair
    assert ours.vocab_size == len(theirs)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.all_special_ids == frozenset(theirs.all_special_ids)
    for token_id in range(0, len(theirs), 97):
        assert ours.id_to_token(token_id) == theirs.convert_ids_to_tokens(token_id)
        assert ours.decode_token(token_id) == theirs.decode([token_id])
    assert ours.decode_token(ours.eos_token_id) == "<|im_end|>"
    assert ours.id_to_token(-1) is None
    assert ours.id_to_token(len(theirs) + 1000) is None


@given(text=st.text(max_size=40))
def test_any_text_comes_back(small, text):
    assert small.decode(small.encode(text), skip_special_tokens=False) == small.backend.normalizer.normalize_str(text)


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "ok \ud83d"])
def test_lone_surrogate_is_refused(small, text):
    surrogate = next(char for char in text if "\ud800" <= char <= "\udfff")
    with pytest.raises(RequestError, match=rf"lone surrogate U\+{ord(surrogate):04X}"):
        small.encode(text)
    with pytest.raises(RequestError, match="lone surrogate"):
        small.encode_batch(["fine", text])


def test_wrong_types_are_refused(small):
    with pytest.raises(RequestError, match="must be a str, not bytes"):
        small.encode(b"abc")
    with pytest.raises(RequestError, match="must be a str, not int"):
        small.encode_batch(["a", 1])
    for ids in ([-1], [2**32], ["a"]):
        with pytest.raises(RequestError, match="token_ids must be integers from 0 to 599"):
            small.decode(ids)


# ---- bos ----


def test_constructor_prepends_bos(small):
    tokenizer = Tokenizer(small.backend, special_tokens={"bos_token": "<|im_start|>"}, add_bos_token=True)
    ids = small.encode("Hello")
    assert tokenizer.encode("Hello") == [1, *ids]
    assert tokenizer.encode_batch(["Hello", ""]) == [[1, *ids], [1]]
    assert tokenizer.encode("Hello", add_special_tokens=False) == ids


@pytest.mark.parametrize("special_tokens", [None, {"bos_token": "<s>"}])
def test_bos_must_be_known(small, special_tokens):
    with pytest.raises(CheckpointError, match="add_bos_token is set but bos_token"):
        Tokenizer(small.backend, special_tokens=special_tokens, add_bos_token=True)


@pytest.mark.parametrize("add_bos_token", [True, False, ...])
@pytest.mark.parametrize("post_processor", [True, False])
def test_bos_of_a_folder_is_what_transformers_adds(folder, post_processor, add_bos_token):
    if post_processor:
        backend = Backend.from_file(str(folder / "tokenizer.json"))
        template = "<|im_start|> $A"
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<|im_start|>", 1)])
        backend.save(str(folder / "tokenizer.json"))
    edit_json(folder / "tokenizer_config.json", add_bos_token=add_bos_token)
    ids = Tokenizer.from_dir(folder).encode("Hello")
    assert ids == AutoTokenizer.from_pretrained(str(folder)).encode("Hello")
    assert (ids[0] == 1) == post_processor


@pytest.mark.parametrize("add_bos_token", [True, False])
@pytest.mark.parametrize("post_processor", [True, False])
def test_bos_of_a_llama_folder_is_what_transformers_adds(tmp_path, post_processor, add_bos_token):
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "▁": 3, "H": 4, "i": 5, "▁H": 6}
    backend = Backend(
        models.BPE(vocab=vocab, merges=[("▁", "H")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = llama_decoder()
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    edit_json(
        tmp_path / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", add_bos_token=add_bos_token, **named
    )
    ids = Tokenizer.from_dir(tmp_path).encode("Hi")
    assert ids == AutoTokenizer.from_pretrained(str(tmp_path)).encode("Hi")
    assert ids == ([1] if post_processor else []) + [6, 5]


def llama_decoder():
    return decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


# ---- files of a folder ----


def test_missing_tokenizer_json(tmp_path):
    (tmp_path / "tokenizer.model").touch()
    with pytest.raises(
        CheckpointError, match=r"looked for tokenizer.json in .*found tokenizer.model.*only fast tokenizers"
    ):
        Tokenizer.from_dir(tmp_path)
    with pytest.raises(CheckpointError, match="looked for tokenizer.json"):
        Tokenizer.from_dir(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": 3}', "\x00\x01"])
def test_damaged_tokenizer_json(folder, content):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="is not a readable tokenizer"):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "chat_template.json"])
@pytest.mark.parametrize("content, message", [("{", "cannot be read as JSON"), ("[1]", "must be a JSON object")])
def test_damaged_settings(folder, name, content, message):
    edit_json(folder / "tokenizer_config.json", chat_template=...)
    (folder / name).write_text(content)
    with pytest.raises(CheckpointError, match=f"{name}.*{message}"):
        Tokenizer.from_dir(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"added_tokens_decoder": {"600": "<x>"}},
        {"added_tokens_decoder": ["<x>"]},
        {"chat_template": [{"name": "default"}]},
        {"extra_special_tokens": 7},
    ],
)
def test_malformed_settings(folder, changes):
    edit_json(folder / "tokenizer_config.json", **changes)
    with pytest.raises(CheckpointError, match="settings in .* are malformed"):
        Tokenizer.from_dir(folder)


STRIP_FIRST = [decoders.Fuse(), decoders.Strip(" ", 1, 0), decoders.Replace("▁", " ")]
UNSUPPORTED_DECODERS = [
    None,
    decoders.WordPiece(),
    decoders.CTC(),
    decoders.Strip(" ", 1, 0),
    decoders.Replace("ab", " "),
    decoders.Sequence(STRIP_FIRST),
    decoders.Sequence([decoders.Fuse(), decoders.Metaspace()]),
    decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()]),
]


@pytest.mark.parametrize("decoder", UNSUPPORTED_DECODERS)
def test_decoder_that_cannot_be_streamed(decoder):
    backend = Backend(models.BPE(vocab={"a": 0}, merges=[]))
    if decoder is not None:
        backend.decoder = decoder
    with pytest.raises(CheckpointError, match=r"decoder \{.*\} cannot be streamed; supported are ByteLevel"):
        Tokenizer(backend)


def test_settings_add_special_tokens_as_transformers_does(folder):
    text = "a day<new>, <extra>the<|im_end|> more<plain> <named>money"
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    by_id = {
        "600": {"content": "<new>", "special": True, **flags},
        "601": {"content": "<plain>", "special": False, **flags},
    }
    edit_json(
        folder / "tokenizer_config.json",
        added_tokens_decoder=by_id,
        unk_token={"content": "Ġday", "__type": "AddedToken", **flags},
        image_token="<named>",
        additional_special_tokens=["<extra>"],
    )
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(str(folder))
    assert ours.encode(text) == theirs.encode(text)
    assert ours.vocab_size == len(theirs)
    ids = theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == "a, the more<plain> money"
    assert ours.all_special_ids >= frozenset(theirs.all_special_ids)
    assert ours.special_tokens == theirs.special_tokens_map


@pytest.mark.parametrize("with_added_tokens_decoder", [True, False])
def test_special_tokens_map_counts_as_in_transformers(folder, with_added_tokens_decoder):
    edit_json(
        folder / "special_tokens_map.json", eos_token={"content": "<|endoftext|>", "lstrip": False}, bos_token="<think>"
    )
    if with_added_tokens_decoder:
        edit_json(
            folder / "tokenizer_config.json", added_tokens_decoder={"0": {"content": "<|endoftext|>", "special": True}}
        )
    ours, theirs = Tokenizer.from_dir(folder), PreTrainedTokenizerFast.from_pretrained(str(folder))
    assert ours.eos_token_id == theirs.eos_token_id == (2 if with_added_tokens_decoder else 0)
    assert ours.bos_token_id == theirs.bos_token_id


def test_only_tokenizer_json_is_needed(folder):
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_dir(folder)
    assert tokenizer.encode("Hello") == Tokenizer.from_dir(SMALL).encode("Hello")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (None, None)
    assert tokenizer.all_special_ids == {0, 1, 2}


def test_baked_in_truncation_and_padding_do_not_count(folder):
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=512)
    backend.save(str(folder / "tokenizer.json"))
    assert Tokenizer.from_dir(folder).encode(TEXTS[4]) == Tokenizer.from_dir(SMALL).encode(TEXTS[4])


# ---- rendering ----


def test_import_is_light():
    code = (
        "import sys, nanovllm.text.tokenizer, nanovllm.text.detokenizer;"
        "print(sorted({'torch', 'transformers', 'jinja2', 'tokenizers', 'numpy'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
