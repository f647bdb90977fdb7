"""The sampling parameters of a request, under vLLM's names. They are checked on construction."""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nanovllm.option import option

MAX_N = 128
MAX_LOGPROBS = 100
GREEDY_BELOW = 1e-5  # lower temperatures mean greedy sampling: logits / temperature could overflow
MAX_SCHEMA_BYTES, MAX_SCHEMA_DEPTH = 256 * 1024, 64
MAX_REGEX_BYTES = 8 * 1024
MAX_CHOICES, MAX_CHOICE_BYTES = 1024, 64 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_VALUE_CHARS = 1000  # an error message shows at most this much of a value


def _refuse(field: str, value: object, rule: str) -> None:
    text = repr(value)
    raise ValueError(f"{field}={text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + '...'}: {rule}")


def _check_int(field: str, value: object, low: int, high: int | None = None) -> None:
    upper = "" if high is None else f" and at most {high}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        _refuse(field, value, f"must be an integer of at least {low}{upper}")


def _check_float(field: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if not number or not (low < value if open_low else low <= value) or value > high:  # type: ignore[operator]
        span = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        _refuse(field, value, f"must be a finite number in {span}")


def _check_bool(field: str, value: object) -> None:
    if not isinstance(value, bool):
        _refuse(field, value, "must be True or False")


def _strings(field: str, value: object) -> tuple[str, ...]:
    """A tuple of non-empty strings, from None, one string or a list of strings."""
    items = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence) else None
    if value is None:
        return ()
    if items is None or not all(isinstance(item, str) and item for item in items):
        _refuse(field, value, "must be a non-empty string or a list of them")
    return items  # type: ignore[return-value]


def _token_ids(field: str, value: object) -> tuple[int, ...]:
    """A tuple of token ids, from None or a list."""
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else (None,)
    if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
        _refuse(field, value, "must be a list of token ids (integers of at least 0)")
    return ids


def _check_size(field: str, text: str, limit: int) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        _refuse(field, text, "is not valid Unicode: it has a lone surrogate")
    if size > limit:
        raise ValueError(f"{field}: must have at most {limit} bytes, and has {size} bytes")


def _depth(value: object) -> int:
    """How deep objects and arrays are nested. Counts without recursion, and stops above MAX_SCHEMA_DEPTH."""
    depth, level = 0, [value]
    while level and depth <= MAX_SCHEMA_DEPTH:
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        depth, level = depth + bool(inner), [part for items in inner for part in items]
    return depth


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _schema_text(schema: object) -> str:
    """Check a schema, given as a mapping or as JSON text, and return it as JSON text."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False, allow_nan=False)
        _check_size("json", text, MAX_SCHEMA_BYTES)
        parsed = json.loads(text, parse_constant=_not_json)
    except RecursionError:
        raise ValueError(f"json: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels") from None
    except (TypeError, ValueError) as error:
        raise ValueError(f"json: not a JSON schema: {error}") from None
    if not isinstance(parsed, dict):
        _refuse("json", parsed, "a JSON schema must be an object, or the text of one")
    if _depth(parsed) > MAX_SCHEMA_DEPTH:
        raise ValueError(f"json: the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    return text


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the completion must match. Exactly one field is set."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema; stored as JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a regular expression for the whole completion, in the syntax of Rust's regex crate
    choice: Sequence[str] | None = None  # one of these strings
    grammar: str | None = None  # a grammar in llguidance's dialect of Lark, or in GBNF

    def __post_init__(self) -> None:
        _check_bool("json_object", self.json_object)
        kinds = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(kinds) != 1:
            found = f"{', '.join(kinds)} are" if kinds else "nothing is"
            raise ValueError(
                f"structured_outputs: {found} set; set exactly one of json, json_object, regex, choice and grammar"
            )
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        for name, limit in (("regex", MAX_REGEX_BYTES), ("grammar", MAX_GRAMMAR_BYTES)):
            text = getattr(self, name)
            if text is not None:
                if not isinstance(text, str) or not text:
                    _refuse(name, text, "must be a non-empty string")
                _check_size(name, text, limit)
        if self.choice is not None:
            self._check_choice()

    def _check_choice(self) -> None:
        if isinstance(self.choice, str):
            _refuse("choice", self.choice, "must be a list of strings")
        choice = tuple(dict.fromkeys(_strings("choice", self.choice)))
        if not 0 < len(choice) <= MAX_CHOICES:
            raise ValueError(f"choice: must have 1 to {MAX_CHOICES} strings, and has {len(choice)}")
        _check_size("choice", "".join(choice), MAX_CHOICE_BYTES)
        object.__setattr__(self, "choice", choice)

    @property
    def source(self) -> tuple[str, str]:
        """(kind, text): the kind of grammar (json, choice, regex or grammar) and its source text."""
        if self.json_object:
            return "json", '{"type": "object"}'
        if self.choice is not None:
            return "choice", json.dumps(self.choice)
        return next((kind, text) for kind in ("json", "regex", "grammar") if (text := getattr(self, kind)) is not None)

    def __repr__(self) -> str:
        """Short enough for a line in a log, however long the schema is."""
        kind, value = next((f.name, v) for f in fields(self) if (v := getattr(self, f.name)) not in (None, False))
        text = repr(value)
        return f"StructuredOutputs({kind}={text if len(text) <= 80 else text[:77] + '...'})"


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How the completions of one prompt are sampled.

    `temperature=0` is greedy sampling; `max_tokens=None` means up to the model's maximum length.
    """

    n: int = option(1, "Number of completions for one prompt.")
    temperature: float = option(
        1.0, "Randomness of sampling: logits are divided by it. 0 always takes the most likely token (greedy)."
    )
    top_p: float = option(
        1.0, "Sample only from the most likely tokens whose probabilities sum up to at least this; 1 allows all tokens."
    )
    top_k: int = option(0, "Sample only from this many most likely tokens; 0 or -1 allows all tokens.")
    min_p: float = option(
        0.0, "Sample only from tokens with at least this fraction of the most likely token's probability; 0 allows all."
    )
    presence_penalty: float = option(
        0.0, "Value from -2 to 2 that is subtracted from the logits of tokens that the output already contains."
    )
    frequency_penalty: float = option(
        0.0, "Value from -2 to 2 that is subtracted from a token's logit once for each time the output contains it."
    )
    repetition_penalty: float = option(
        1.0, "Factor that makes tokens of the prompt and the output less likely if it is above 1; 1 changes nothing."
    )
    seed: int | None = option(
        None, "Random seed of this request. Without it, the engine derives one from its own seed."
    )
    stop: str | Sequence[str] | None = option(
        None, "Text that ends the output when it is generated. May be given several times."
    )
    stop_token_ids: Sequence[int] | None = option(None, "Token ids that end the output when they are generated.")
    include_stop_str_in_output: bool = option(False, "Keep the stop string at the end of the output.")
    ignore_eos: bool = option(False, "Continue after the model's end-of-sequence token.")
    max_tokens: int | None = option(64, "Maximum number of tokens to generate. None means up to max_model_len.")
    min_tokens: int = option(
        0, "Minimum number of tokens. Before it no stop token is generated and stop strings are ignored."
    )
    logprobs: int | None = option(
        None,
        "Number of most likely tokens to report with their log probabilities at each position, in addition to the "
        "sampled token; 0 reports the sampled token only, None reports nothing.",
    )
    prompt_logprobs: int | None = option(None, "The same as logprobs, for the tokens of the prompt.")
    logit_bias: Mapping[int, float] | None = option(
        None, "Values from -100 to 100 that are added to the logits of these token ids."
    )
    allowed_token_ids: Sequence[int] | None = option(None, "The only token ids that may be generated. None allows all.")
    bad_words: Sequence[str] | None = option(None, "Texts that must not be generated.")
    structured_outputs: StructuredOutputs | None = option(
        None, "The form that the output must have. Tokens that would break it cannot be generated."
    )
    skip_special_tokens: bool = option(True, "Leave special tokens such as the end-of-sequence token out of the text.")
    detokenize: bool = option(True, "Produce text. With False the output consists of token ids only.")

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_lists()
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"):
            _check_bool(name, getattr(self, name))
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            _refuse("structured_outputs", self.structured_outputs, "must be a StructuredOutputs")
        if self.stop and not self.detokenize:
            _refuse("stop", self.stop, "stop strings need detokenization: set detokenize=True or use stop_token_ids")

    def _check_numbers(self) -> None:
        _check_int("n", self.n, 1, MAX_N)
        _check_float("temperature", self.temperature, 0.0, math.inf)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_int("top_k", self.top_k, -1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            _refuse("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_lists(self) -> None:
        """Check the list-like fields and convert them to tuples, so that nothing in the frozen object can change."""
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, _strings(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                _refuse("allowed_token_ids", allowed, "must name at least one token, or be None to allow all")
            object.__setattr__(self, "allowed_token_ids", allowed)
        bias = self.logit_bias
        if bias is not None:
            if not isinstance(bias, Mapping):
                _refuse("logit_bias", bias, "must map token ids to numbers in [-100, 100]")
            for token, value in bias.items():
                _check_int("logit_bias token", token, 0)
                _check_float(f"logit_bias[{token}]", value, -100.0, 100.0)
            object.__setattr__(self, "logit_bias", dict(bias))

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def clone(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed. The copy is checked again."""
        return replace(self, **changes)

    def __repr__(self) -> str:
        """Only the fields that differ from their defaults."""
        shown = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if not self._is_default(f.name, f.default)]
        return f"SamplingParams({', '.join(shown)})"

    def _is_default(self, name: str, default: object) -> bool:
        value = getattr(self, name)
        return value == default or (default is None and value == ())


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search: keep the `beam_width` best beams by cumulative logprob / length ** length_penalty."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        _check_int("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        _check_int("max_tokens", self.max_tokens, 1)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_float("length_penalty", self.length_penalty, -math.inf, math.inf)
