"""The sampling parameters of a request, under vLLM's names. They are checked on construction."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from nanovllm.option import check_options, integer, number, of_type, option, refuse

MAX_N = 128
MAX_LOGPROBS = 100
GREEDY_BELOW = 1e-5  # lower temperatures mean greedy sampling: logits / temperature could overflow
FLAG = of_type(bool, "True or False")
LISTS = {  # parameters that are lists or mappings, and their values if unset
    **{"stop": (), "bad_words": (), "stop_token_ids": (), "logprob_token_ids": ()},
    **{"allowed_token_ids": None, "logit_bias": None},
}


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

    n: int = option(1, "Number of completions for one prompt.", integer(1, MAX_N))
    temperature: float = option(
        1.0,
        "Randomness of sampling: logits are divided by it. 0 always takes the most likely token (greedy).",
        number(0, inf),
    )
    top_p: float = option(
        1.0,
        "Sample only from the most likely tokens whose probabilities sum up to at least this; 1 allows all tokens.",
        number(0, 1, open_low=True),
    )
    top_k: int = option(0, "Sample only from this many most likely tokens; 0 or -1 allows all tokens.", integer(-1))
    min_p: float = option(
        0.0,
        "Sample only from tokens with at least this fraction of the most likely token's probability; 0 allows all.",
        number(0, 1),
    )
    presence_penalty: float = option(
        0.0,
        "Value from -2 to 2 that is subtracted from the logits of tokens that the output already contains.",
        number(-2, 2),
    )
    frequency_penalty: float = option(
        0.0,
        "Value from -2 to 2 that is subtracted from a token's logit once for each time the output contains it.",
        number(-2, 2),
    )
    repetition_penalty: float = option(
        1.0,
        "Factor that makes tokens of the prompt and the output less likely if it is above 1; 1 changes nothing.",
        number(0, inf, open_low=True),
    )
    seed: int | None = option(
        None,
        "Random seed of this request. Without it, the engine derives one from its own seed.",
        integer(-(2**63), 2**64 - 1),
    )
    stop: str | Sequence[str] | None = option(
        None, "Text that ends the output when it is generated. May be given several times."
    )
    stop_token_ids: Sequence[int] | None = option(None, "Token ids that end the output when they are generated.")
    include_stop_str_in_output: bool = option(False, "Keep the stop string at the end of the output.", FLAG)
    ignore_eos: bool = option(False, "Continue after the model's end-of-sequence token.", FLAG)
    max_tokens: int | None = option(
        64, "Maximum number of tokens to generate. None means up to max_model_len.", integer(1, also=(None,))
    )
    min_tokens: int = option(
        0,
        "Minimum number of tokens. Before it no stop token is generated and stop strings are ignored.",
        integer(0),
    )
    logprobs: int | None = option(
        None,
        "Number of most likely tokens to report with their log probabilities at each position, in addition to the "
        "sampled token; 0 reports the sampled token only, None reports nothing.",
        integer(0, MAX_LOGPROBS),
    )
    prompt_logprobs: int | None = option(
        None, "The same as logprobs, for the tokens of the prompt.", integer(0, MAX_LOGPROBS)
    )
    logprob_token_ids: Sequence[int] | None = option(
        None, "Token ids to report at each position instead of the most likely tokens. Needs logprobs."
    )
    logit_bias: Mapping[int, float] | None = option(
        None, "Values from -100 to 100 that are added to the logits of these token ids."
    )
    allowed_token_ids: Sequence[int] | None = option(None, "The only token ids that may be generated. None allows all.")
    bad_words: Sequence[str] | None = option(None, "Texts that must not be generated.")
    structured_outputs: StructuredOutputs | None = option(
        None,
        "The form that the output must have. Tokens that would break it cannot be generated.",
        of_type(StructuredOutputs, "a StructuredOutputs"),
    )
    thinking_token_budget: int | None = option(
        None,
        "Maximum number of tokens of reasoning. After them the model must end its reasoning (</think>).",
        integer(0),
    )
    skip_special_tokens: bool = option(
        True, "Leave special tokens such as the end-of-sequence token out of the text.", FLAG
    )
    detokenize: bool = option(True, "Produce text. With False the output consists of token ids only.", FLAG)

    def __post_init__(self) -> None:
        check_options(self)
        for name, value in LISTS.items():
            if (given := getattr(self, name)) is not None:
                from nanovllm.value_lists import checked_list

                value = checked_list(name, given)
            object.__setattr__(self, name, value)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            refuse("min_tokens", self.min_tokens, f"must not exceed max_tokens={self.max_tokens}")
        if self.logprob_token_ids and self.logprobs is None:
            refuse("logprob_token_ids", self.logprob_token_ids, "needs logprobs; set it to 0 or more")
        if self.stop and not self.detokenize:
            refuse("stop", self.stop, "stop strings need detokenization: set detokenize=True or use stop_token_ids")

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < GREEDY_BELOW

    def clone(self, **changes: Any) -> "SamplingParams":
        """A copy with some fields changed. The copy is checked again."""
        return replace(self, **changes)

    def __repr__(self) -> str:
        """Only the fields that differ from their defaults; an empty list is one."""
        values = [(field.name, getattr(self, field.name), field.default) for field in fields(self)]
        shown = [f"{name}={value!r}" for name, value, default in values if value not in (default, ())]
        return f"SamplingParams({', '.join(shown)})"
