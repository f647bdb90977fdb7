"""Beam search as in vLLM: beams are scored by cumulative logprob / length ** length_penalty.

In every step the engine generates one token of every live beam, with the logprobs of its best continuations. Beams
share their common prefix through the prefix cache: only the last, partly filled block of a beam is computed again.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass
from math import inf
from typing import TYPE_CHECKING

from nanovllm.errors import RequestError
from nanovllm.option import check_options, integer, number, option
from nanovllm.outputs import FinishReason, RequestOutput
from nanovllm.sampling_params import FLAG, MAX_LOGPROBS, SamplingParams

if TYPE_CHECKING:
    from nanovllm.text.tokenizer import Tokenizer

Generate = Callable[[list[list[int]], SamplingParams], list[RequestOutput]]


@dataclass(frozen=True, kw_only=True)
class BeamSearchParams:
    """Beam search: keep the `beam_width` best beams by cumulative logprob / length ** length_penalty."""

    beam_width: int = option(MISSING, "Number of beams that are kept.", integer(1, MAX_LOGPROBS // 2))
    max_tokens: int = option(MISSING, "Maximum number of tokens to generate.", integer(1))
    ignore_eos: bool = option(False, "Continue after the model's end-of-sequence token.", FLAG)
    length_penalty: float = option(1.0, "Exponent of the length by which scores are divided.", number(-inf, inf))

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A finished beam. As in vLLM, `tokens` has the prompt and the completion."""

    tokens: list[int]
    text: str
    cum_logprob: float
    finish_reason: FinishReason
    stop_reason: int | None = None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class Beam:
    token_ids: tuple[int, ...]  # prompt and continuation
    cum_logprob: float
    ended: bool = False

    def score(self, length_penalty: float) -> float:
        length = len(self.token_ids) - self.ended  # the end-of-sequence token does not count
        return self.cum_logprob / length**length_penalty


def beam_search(
    prompts: list[list[int]],
    params: BeamSearchParams,
    *,
    generate: Generate,
    tokenizer: "Tokenizer | None",
    max_model_len: int,
    eos_token_ids: frozenset[int],
) -> list[BeamSearchOutput]:
    """The best beams of each prompt; `generate` continues a list of prompts by what its parameters say."""
    for prompt in prompts:
        if len(prompt) + params.max_tokens > max_model_len:
            raise RequestError(
                f"the prompt of {len(prompt)} tokens and max_tokens={params.max_tokens} exceed "
                f"max_model_len={max_model_len}: shorten the one or lower the other"
            )
    live = [[Beam(tuple(prompt), 0.0)] for prompt in prompts]
    done: list[list[Beam]] = [[] for _ in prompts]
    eos = frozenset() if params.ignore_eos else eos_token_ids
    for _ in range(params.max_tokens):
        expanded = _expand([beam for beams in live for beam in beams], generate, params.beam_width, eos)
        for index, beams in enumerate(live):
            children = [child for beam in beams for child in expanded[beam]]
            done[index] += [child for child in children if child.ended]
            going = [child for child in children if not child.ended]
            live[index] = _best(going, params)
        if not any(live):
            break
    return [
        BeamSearchOutput([_finish(beam, tokenizer, len(prompt)) for beam in _best(done[index] + live[index], params)])
        for index, prompt in enumerate(prompts)
    ]


def _expand(beams: list[Beam], generate: Generate, beam_width: int, eos: frozenset[int]) -> dict[Beam, list[Beam]]:
    """Each beam's 2 * beam_width best children: enough that ended ones leave a full width of live ones."""
    one_token = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=2 * beam_width, ignore_eos=True, detokenize=False
    )
    outputs = generate([list(beam.token_ids) for beam in beams], one_token)
    children = {}
    for beam, output in zip(beams, outputs, strict=True):
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        children[beam] = [
            Beam((*beam.token_ids, token), beam.cum_logprob + entry.logprob, ended=token in eos)
            for token, entry in logprobs[0].items()
        ]
    return children


def _best(beams: list[Beam], params: BeamSearchParams) -> list[Beam]:
    return sorted(beams, key=lambda beam: beam.score(params.length_penalty), reverse=True)[: params.beam_width]


def _finish(beam: Beam, tokenizer: "Tokenizer | None", num_prompt_tokens: int) -> BeamSearchSequence:
    text = "" if tokenizer is None else tokenizer.decode(list(beam.token_ids[num_prompt_tokens:]))
    return BeamSearchSequence(
        tokens=list(beam.token_ids),
        text=text,
        cum_logprob=beam.cum_logprob,
        finish_reason="stop" if beam.ended else "length",
        stop_reason=beam.token_ids[-1] if beam.ended else None,
    )
