"""Build a tokenizer of the `tokenizers` library from the metadata of a GGUF file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_splits import NORMALIZED, PATTERNS, WHOLE_WORDS, pre_tokenizer
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

# Values of tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_TOKEN_TYPES = (_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE)

GEMMA4 = "gemma4"  # SentencePiece's pieces, with merges in the file
_MAX_TOKEN_CHARS = 1024  # real tokens have fewer than 300; finding a token's merges is quadratic in its length


def build_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Build the tokenizer. It does not add BOS: the caller does, if `special_tokens` returns add_bos_token=True."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level_tokenizer(metadata)
    elif kind in ("llama", GEMMA4):
        tokenizer = _sentencepiece_tokenizer(metadata)
    else:
        raise _refusal(f"tokenizer.ggml.model is {kind!r}; supported are 'gpt2', 'llama' and {GEMMA4!r}")
    _add_tokens(tokenizer, metadata)
    return tokenizer


def special_tokens(metadata: dict[str, Any]) -> dict[str, Any]:
    """add_bos_token, and the texts of those of bos_token, eos_token, unk_token and pad_token that the file defines."""
    tokens = _tokens(metadata)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {role: _token_id(metadata, key, len(tokens)) for role, key in keys.items()}
    return {role: tokens[token] for role, token in ids.items() if token is not None} | {
        "add_bos_token": ids["bos_token"] is not None and _adds_bos(metadata)
    }


def chat_template(metadata: dict[str, Any]) -> str | None:
    template = metadata.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise _refusal(f"tokenizer.chat_template is of type {type(template).__name__}; it must be a string")
    return template


def _byte_level_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers

    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in PATTERNS:
        known = ", ".join(PATTERNS)
        raise _refusal(f"its pre-tokenizer (tokenizer.ggml.pre) {pre!r} is not supported; supported are: {known}")
    tokenizer = Tokenizer(_bpe(_vocabulary(metadata), _merges(metadata), ignore_merges=pre in WHOLE_WORDS))
    tokenizer.pre_tokenizer = pre_tokenizer(pre)
    if pre in NORMALIZED:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers

    has_merges = metadata.get("tokenizer.ggml.model") == GEMMA4
    vocabulary, merges = _vocabulary(metadata), _merges(metadata) if has_merges else _merges_from_scores(metadata)
    unknown = _unknown_token(metadata, vocabulary)
    tokenizer = Tokenizer(_bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    spaced = not has_merges and _flag(metadata, "add_space_prefix", default=True)
    replaced = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replaced]) if spaced else replaced
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if spaced else steps)
    return tokenizer


def _unknown_token(metadata: dict[str, Any], vocabulary: dict[str, int]) -> str | None:
    tokens, types = _tokens(metadata), _token_types(metadata)
    index = _token_id(metadata, "unknown", len(tokens))
    if index is None:
        index = types.index(_UNKNOWN) if _UNKNOWN in types else None
    if index is not None and tokens[index] not in vocabulary:
        raise _refusal(f"the unknown token {index} is marked as unused")
    return None if index is None else tokens[index]


def _merges(metadata: dict[str, Any]) -> list[tuple[str, ...]]:
    return [tuple(merge.split(" ")) for merge in _list(metadata, "merges", str)]


def _merges_from_scores(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """Derive byte-pair merges from SentencePiece's scores: pairs of tokens that join to a token, best score first."""
    tokens, scores = _tokens(metadata), _list(metadata, "scores", float)
    if len(scores) != len(tokens):
        raise _refusal(f"there are {len(scores)} scores for {len(tokens)} tokens")
    if not all(map(math.isfinite, scores)):
        raise _refusal("a score is not a finite number")
    types = _token_types(metadata)
    normal = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind == _NORMAL}
    merges = [
        (-score, -cut, token[:cut], token[cut:])
        for token, score in normal.items()
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]
    merges.sort()
    return [(left, right) for _, _, left, right in merges]


def _bpe(vocabulary: dict[str, int], merges: list[Any], **options: Any) -> BPE:
    from tokenizers.models import BPE

    try:
        return BPE(vocabulary, merges, **options)
    except Exception as error:  # the library raises plain Exception
        raise _refusal(f"its {len(merges)} merges do not fit its vocabulary: {error}") from error


def _add_tokens(tokenizer: Tokenizer, metadata: dict[str, Any]) -> None:
    """Register control and user-defined tokens, which are matched before the text is split. Their ids do not change."""
    from tokenizers import AddedToken

    typed = list(zip(_tokens(metadata), _token_types(metadata), strict=True))
    control = [token for token, kind in typed if kind in (_CONTROL, _UNKNOWN)]
    defined = [token for token, kind in typed if kind == _USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])


def _adds_bos(metadata: dict[str, Any]) -> bool:
    """Whether texts begin with BOS. Converters omit the flag if the kind of tokenizer implies it."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind == GEMMA4:
        return True  # also in files whose flag says otherwise, as in llama.cpp
    implied = kind == "llama" or pre in WHOLE_WORDS
    return _flag(metadata, "add_bos_token", default=implied)


def _vocabulary(metadata: dict[str, Any]) -> dict[str, int]:
    """Token ids by text, without the unused tokens that only pad the embedding matrix."""
    vocabulary: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(_tokens(metadata), _token_types(metadata), strict=True)):
        if kind == _UNUSED:
            continue
        if vocabulary.setdefault(token, index) != index:
            raise _refusal(f"token {token!r} occurs twice, as {vocabulary[token]} and as {index}")
        if len(token) > _MAX_TOKEN_CHARS:
            raise _refusal(f"token {index} has {len(token)} characters; at most {_MAX_TOKEN_CHARS} are accepted")
    return vocabulary


def _tokens(metadata: dict[str, Any]) -> list[str]:
    return _list(metadata, "tokens", str)


def _token_types(metadata: dict[str, Any]) -> list[int]:
    types, num_tokens = _list(metadata, "token_type", int), len(_tokens(metadata))
    if len(types) != num_tokens:
        raise _refusal(f"there are {len(types)} token types for {num_tokens} tokens")
    if not set(types) <= set(_TOKEN_TYPES):
        raise _refusal(f"token types {sorted(set(types) - set(_TOKEN_TYPES))[:5]} are unknown; they are 1 to 6")
    return types


def _list(metadata: dict[str, Any], key: str, item_type: type) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    # All items of a GGUF array have the same type, so the first is enough.
    if not isinstance(value, list) or not all(isinstance(item, item_type) for item in value[:1]):
        found = "missing" if value is None else f"of type {type(value).__name__}"
        raise _refusal(f"tokenizer.ggml.{key} is {found}; it must be a list of {item_type.__name__}")
    return value


def _token_id(metadata: dict[str, Any], role: str, num_tokens: int) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{role}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < num_tokens:
        raise _refusal(f"tokenizer.ggml.{role}_token_id is {value!r}; it must be a token id below {num_tokens}")
    return value


def _flag(metadata: dict[str, Any], key: str, *, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{key}", default)
    if not isinstance(value, bool):
        raise _refusal(f"tokenizer.ggml.{key} is {value!r}; it must be true or false")
    return value


def _refusal(problem: str) -> CheckpointError:
    return CheckpointError(f"the tokenizer of this GGUF file cannot be used: {problem}")
