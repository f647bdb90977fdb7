"""Requests, checked against the model and turned into sequences for the scheduler."""

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from nanovllm.engine.sequence import Sequence
from nanovllm.errors import RequestError
from nanovllm.sampling_params import SamplingParams
from nanovllm.text.prompts import all_below

if TYPE_CHECKING:
    from nanovllm.engine.text_params import TextParams


@dataclass(frozen=True, kw_only=True)
class Intake:
    vocab_size: int
    eos_token_ids: frozenset[int]
    text_params: "TextParams | None"  # None without a tokenizer
    max_num_tokens: int  # of a sequence, prompt and completion together
    num_cache_tokens: int  # that the KV cache holds
    seeds: Random  # of requests without one

    def check_tokens(self, token_ids: list[int], params: SamplingParams) -> None:
        named = {
            "prompt_token_ids": token_ids,
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "stop_token_ids": params.stop_token_ids or (),
            "logprob_token_ids": params.logprob_token_ids or (),
        }
        for field, ids in named.items():
            if ids and not all_below(self.vocab_size, ids):
                bad = next(token for token in ids if not 0 <= token < self.vocab_size)
                raise RequestError(f"{field}: token id {bad} is outside the vocabulary of {self.vocab_size} tokens")
        if self.text_params is None and _needs_tokenizer(params):
            from nanovllm.engine.text_params import refusal_without_tokenizer

            raise refusal_without_tokenizer(params)

    def make_seqs(
        self,
        request_id: str,
        token_ids: list[int],
        params: SamplingParams,
        *,
        arrival: int,
        priority: int,
        cache_salt: str | None,
    ) -> list[Sequence]:
        """Make `n` sequences. All but the first wait for it, so that they find its prompt in the prefix cache."""
        seed = self.seeds.getrandbits(63) if params.seed is None else params.seed
        room = min(self.max_num_tokens, self.num_cache_tokens + 1)
        wanted = room if params.max_tokens is None else len(token_ids) + params.max_tokens
        eos = frozenset[int]() if params.ignore_eos else self.eos_token_ids
        seqs = [
            Sequence(
                request_id,
                token_ids,
                params if index == 0 else params.clone(prompt_logprobs=None),
                max_num_tokens=min(wanted, self.max_num_tokens),
                stop_token_ids=eos.union(params.stop_token_ids or ()),
                index=index,
                seed=_signed64(seed + index * 0x9E3779B97F4A7C15),
                priority=priority,
                arrival=arrival,
                cache_salt=cache_salt,
            )
            for index in range(params.n)
        ]
        seqs[0].followers = seqs[1:]
        if self.text_params is not None and _needs_tokenizer(params):
            self.text_params.apply(params, seqs, token_ids)
        return seqs


def _needs_tokenizer(params: SamplingParams) -> bool:
    texts = params.stop or params.bad_words or params.structured_outputs
    return bool(texts) or params.thinking_token_budget is not None


def _signed64(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value
