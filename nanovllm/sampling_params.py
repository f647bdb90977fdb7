"""The sampling parameters of a request, under vLLM's names. They are checked on construction."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from nanovllm.checks import check_bool, check_float, check_int, refuse, strings, token_ids
from nanovllm.option import option

MAX_N = 128
MAX_LOGPROBS = 100
GREEDY_BELOW = 1e-5  # lower temperatures mean greedy sampling: logits / temperature could overflow


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """What the completion must match. Exactly one field is set."""

    json: str | Mapping[str, Any] | None = None  # a JSON schema; stored as JSON text
    json_object: bool = False  # any JSON object
    regex: str | None = None  # a regular expression for the whole completion, in the syntax of Rust's regex crate
    choice: Sequence[str] | None = None  # one of these strings
    grammar: str | None = None  # a grammar in llguidance's dialect of Lark, or in GBNF

    def __post_init__(self) -> None:
        from nanovllm.structured_outputs import checked

        for name, value in checked(vars(self)).items():
            object.__setattr__(self, name, value)

    @property
    def source(self) -> tuple[str, str]:
        """(kind, text): the kind of grammar (json, choice, regex or grammar) and its source text."""
        from nanovllm.structured_outputs import grammar_source

        return grammar_source(vars(self))

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
            check_bool(name, getattr(self, name))
        if self.structured_outputs is not None and not isinstance(self.structured_outputs, StructuredOutputs):
            refuse("structured_outputs", self.structured_outputs, "must be a StructuredOutputs")
        if self.stop and not self.detokenize:
            refuse("stop", self.stop, "stop strings need detokenization: set detokenize=True or use stop_token_ids")

    def _check_numbers(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        check_float("temperature", self.temperature, 0.0, math.inf)
        check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        check_int("top_k", self.top_k, -1)
        check_float("min_p", self.min_p, 0.0, 1.0)
        check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_float("repetition_penalty", self.repetition_penalty, 0.0, math.inf, open_low=True)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1)
        check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS)

    def _check_lists(self) -> None:
        """Check the list-like fields and convert them to tuples, so that nothing in the frozen object can change."""
        for name in ("stop", "bad_words"):
            object.__setattr__(self, name, strings(name, getattr(self, name)))
        object.__setattr__(self, "stop_token_ids", token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                refuse("allowed_token_ids", allowed, "must name at least one token, or be None to allow all")
            object.__setattr__(self, "allowed_token_ids", allowed)
        bias = self.logit_bias
        if bias is not None:
            if not isinstance(bias, Mapping):
                refuse("logit_bias", bias, "must map token ids to numbers in [-100, 100]")
            for token, value in bias.items():
                check_int("logit_bias token", token, 0)
                check_float(f"logit_bias[{token}]", value, -100.0, 100.0)
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
        check_int("beam_width", self.beam_width, 1, MAX_LOGPROBS // 2)
        check_int("max_tokens", self.max_tokens, 1)
        check_bool("ignore_eos", self.ignore_eos)
        check_float("length_penalty", self.length_penalty, -math.inf, math.inf)
