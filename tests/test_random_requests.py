"""Random requests to real engines of models with a state per row or with windows: the greedy tokens of transformers.

Prompts begin with others' prompts and answers. Requests come between steps, some leave early, some want several
completions; blocks, checkpoints and the budget of a step are few. All states per row
are NaN before the first step, so that one that is read before it was written makes wrong tokens.
"""

import math
from random import Random
from typing import Any

import pytest
import torch

from nanovllm import LLM, RequestOutput
from nanovllm.engine.consistency import check_scheduler
from tests.helpers import VOCAB_SIZE, assert_greedy, greedy_params, open_llm, reference_logprobs, scheduler_of

NUM_REQUESTS = 6


@torch.inference_mode()
def poison(llm: LLM) -> None:
    runner: Any = llm.llm_engine._core.executor
    for state in runner.states:
        if isinstance(state, torch.Tensor):  # the others are the paged cache
            state.fill_(math.nan)
    if runner._row_states is not None:
        runner._row_states._checkpoints.fill_(-1)  # as numbers of 32 bits: NaN


def tokens_of(random: Random, count: int) -> list[int]:
    return [random.randrange(3, VOCAB_SIZE) for _ in range(count)]


def prompt_after(random: Random, known: list[list[int]]) -> list[int]:
    base = random.choice(known)
    return (base[: random.randrange(1, len(base) + 1)] + tokens_of(random, random.randrange(1, 30)))[:120]


def options_of(random: Random, **fixed: Any) -> dict[str, Any]:
    """A prompt and its answer have at most 150 tokens, which 10 blocks hold."""
    drawn = {
        "overlap": random.random() < 0.5,
        "enable_prefix_caching": random.random() < 0.8,
        "max_num_batched_tokens": random.choice([7, 13, 33, 200]),
        "max_num_seqs": random.choice([2, 3, 5]),  # and twice as many checkpoints
        "num_kv_cache_blocks": random.choice([11, 16, 80]),
    }
    return drawn | fixed


def run(llm: LLM, random: Random) -> list[RequestOutput]:
    known = [tokens_of(random, random.randrange(20, 90)) for _ in range(2)]
    asked: list[str] = []
    outputs: list[RequestOutput] = []

    def step() -> None:
        for output in llm.step():
            outputs.append(output)
            known.append(output.prompt_token_ids + output["token_ids"])
        check_scheduler(scheduler_of(llm))

    for _ in range(NUM_REQUESTS):
        params = greedy_params(random.randrange(1, 24), n=random.choice([1, 1, 2]), logprobs=0)
        asked.append(llm.add_request(prompt_after(random, known), params))
        for _ in range(random.randrange(12)):
            step()
        if random.random() < 0.1:
            llm.abort(random.choice(asked))
        if random.random() < 0.05:
            llm.reset_prefix_cache()
    while not llm.is_finished():
        step()
    return outputs


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", ["lfm2", "qwen3.5", "olmo3"])
def test_tokens_and_hits(family: str, seed: int) -> None:
    random = Random(seed)
    cached = {"num_kv_cache_blocks": 80 if seed else 11, "enable_prefix_caching": True}
    options = options_of(random, **cached if seed < 2 else {})
    with open_llm(family, **options) as llm:
        poison(llm)
        outputs = run(llm, random)
        for output in outputs:
            for completion in output.outputs:
                assert_greedy(family, output.prompt_token_ids, completion.token_ids)
                expected = reference_logprobs(family, output.prompt_token_ids + completion.token_ids)
                begin = len(output.prompt_token_ids) - 1
                for index, entries in enumerate(completion.logprobs or []):
                    token = completion.token_ids[index]
                    assert abs(entries[token].logprob - expected[begin + index, token].item()) < 2e-3  # and no NaN
        blocks, hits = scheduler_of(llm).block_manager, [output.num_cached_tokens for output in outputs]
        assert len(outputs) > NUM_REQUESTS // 2
        assert sum(hits) <= blocks.num_hit_tokens <= blocks.num_queried_tokens
        if not options["enable_prefix_caching"]:
            assert blocks.num_hit_tokens == 0
        elif options["num_kv_cache_blocks"] == 80:
            assert sum(hits) > 0
        check_a_repeated_prompt(llm, outputs[-1].prompt_token_ids)


def check_a_repeated_prompt(llm: LLM, prompt: list[int]) -> None:
    """Whatever was evicted before: with an idle engine the second request finds all full blocks."""
    params = greedy_params(1)
    found = [llm.generate([prompt], params, use_tqdm=False)[0].num_cached_tokens for _ in range(2)][1]
    assert found == (len(prompt) - 1) // 16 * 16 * scheduler_of(llm).block_manager.enable_prefix_caching
