"""How the byte-level tokenizers of GGUF files split text before merges, by the name in `tokenizer.ggml.pre`.

The names and what they mean are llama.cpp's. Where its patterns approximate those of a model's own tokenizer.json, the
model's are used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers.pre_tokenizers import PreTokenizer

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _gpt4(number: str, marks: str = "") -> str:
    """The pattern of GPT-4, with other rules for numbers, and with marks as a part of words."""
    word, other = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}{marks}]+", rf" ?[^\s\p{{L}}{marks}\p{{N}}]+[\r\n]*"
    return "|".join([_CONTRACTION, word, number, other, _BLANKS])


def _by_case(ending: str, number: str) -> str:
    """A pattern in which a change from lower to upper case begins another word."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    words = [rf"[^\r\n\p{{L}}\p{{N}}]?{word}{ending}" for word in (f"{upper}*{lower}+", f"{upper}+{lower}*")]
    return "|".join([*words, number, r" ?[^\s\p{L}\p{N}]+[\r\n/]*", _BLANKS])


# Letters of scripts with two cases, as DeepSeek's tokenizers list them.
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK = (
    r"[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _ASIAN,
    r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _ASIAN, r"\p{N}")
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _BLANKS,
)
_DEFAULT = (r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "lfm2")
WHOLE_WORDS = (*_LLAMA3, "tekken")  # a word that is a token needs no merges; BOS is implied
NORMALIZED = ("qwen2", "qwen35")  # texts are normalized (NFC) before they are split
PATTERNS: dict[str, tuple[str, ...]] = {  # each splits the pieces that the one before it made
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "olmo"), (_GPT2,)),
    **dict.fromkeys(("smollm", "refact"), (r"\p{N}", _GPT2)),
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), (_gpt4(r"\p{N}{1,3}"),)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), (_gpt4(r"\p{N}"),)),
    "qwen35": (_gpt4(r"\p{N}", marks=r"\p{M}"),),
    "gpt-4o": (_by_case(f"{_CONTRACTION}?", r"\p{N}{1,3}"),),
    "tekken": (_by_case("", r"\p{N}"),),
    "deepseek-llm": _DEEPSEEK,
    "deepseek-coder": _DEEPSEEK_CODER,
    "deepseek-v3": _DEEPSEEK_3,
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Splits a text by the patterns of this name, and writes its bytes as characters."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split

    splits = [Split(Regex(pattern), behavior="isolated") for pattern in PATTERNS[name]]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])
