"""Sliding windows free what they have left: long prompts in a small cache, with the tokens of transformers."""

import json
from itertools import product
from pathlib import Path

import pytest

from nanovllm import LLM
from nanovllm.engine.consistency import check_scheduler
from nanovllm.errors import RequestError
from nanovllm.state import BlockGroup
from tests.helpers import BLOCK_SIZE, assert_greedy, greedy_params, open_llm, prompt_of, scheduler_of

MAX_TOKENS = 40
SHARED = prompt_of(96, seed=3)
PROMPTS = [SHARED + prompt_of(100), prompt_of(150, seed=1), SHARED + prompt_of(30), prompt_of(7), SHARED]
# Blocks of the first group. A mixed model keeps whole sequences in its full layers, so it needs more.
FEW, MANY = {"mistral": 5, "qwen2-sliding": 16}, {"mistral": 64, "qwen2-sliding": 80}
# overlap, prefix cache, chunked prefill, few blocks: every pair of values of every two axes
WAYS = [(0, 0, 0, 0), (0, 1, 1, 1), (1, 0, 1, 1), (1, 1, 0, 1), (1, 1, 1, 0)]


def watch_held_blocks(llm: LLM, max_num_new: int) -> None:
    """After every step, no sequence holds more than its window and what a step adds to it."""
    scheduler, groups = scheduler_of(llm), scheduler_of(llm).config.groups
    schedule = scheduler.schedule

    def checked() -> object:
        plan = schedule()
        check_scheduler(scheduler)
        for seq in scheduler.running:
            for group, table in zip(groups, seq.block_tables, strict=True):
                if group.window is not None:
                    assert len(table.held) <= -(-(group.window + max_num_new - 2) // BLOCK_SIZE) + 1
        return plan

    scheduler.schedule = checked


@pytest.mark.parametrize(("family", "way"), list(product(FEW, WAYS)))
def test_long_prompts(family: str, way: tuple[int, int, int, int]) -> None:
    overlap, prefix_cache, chunked, few = way
    budget = 24 if chunked else 512
    llm = open_llm(
        family,
        overlap=bool(overlap),
        enable_prefix_caching=bool(prefix_cache),
        max_num_batched_tokens=budget,
        num_kv_cache_blocks=(FEW if few else MANY)[family],
    )
    with llm:
        watch_held_blocks(llm, budget)
        for _ in range(1 + prefix_cache):
            outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert_greedy(family, prompt, output["token_ids"])
        if prefix_cache and not few:
            assert [o.num_cached_tokens for o in outputs] == [(len(p) - 1) // 16 * 16 for p in PROMPTS]
        if few and family != "mistral":
            assert scheduler_of(llm).num_preemptions
        check_scheduler(scheduler_of(llm))
        assert scheduler_of(llm).block_manager.num_available == scheduler_of(llm).config.num_blocks


def test_a_prompt_longer_than_the_cache_runs_and_one_whose_window_does_not_fit_is_refused() -> None:
    """A window of 20 tokens touches up to 3 blocks of 16."""
    with open_llm("mistral", num_kv_cache_blocks=3) as llm:
        (output,) = llm.generate([PROMPTS[0]], greedy_params(MAX_TOKENS), use_tqdm=False)
        assert_greedy("mistral", PROMPTS[0], output["token_ids"])
        assert scheduler_of(llm).config.max_cached_tokens == 256
    with open_llm("mistral", num_kv_cache_blocks=2) as llm:
        with pytest.raises(RequestError, match="need 3 KV blocks .* for a window of 20 tokens"):
            llm.generate([PROMPTS[0]], greedy_params(MAX_TOKENS), use_tqdm=False)
        (output,) = llm.generate([PROMPTS[3]], greedy_params(10), use_tqdm=False)
        assert_greedy("mistral", PROMPTS[3], output["token_ids"])


def test_a_mixed_model_has_a_group_for_each_window() -> None:
    with open_llm("qwen2-sliding", num_kv_cache_blocks=60) as llm:
        assert scheduler_of(llm).config.groups == (BlockGroup(60), BlockGroup(60, 12))
    with open_llm("qwen2-sliding", num_kv_cache_blocks=60, max_num_seqs=2, max_num_batched_tokens=64) as llm:
        # two windows, as many again for cached prefixes, and the tokens of a step
        assert scheduler_of(llm).config.groups == (BlockGroup(60), BlockGroup(2 * 2 * 2 + 4, 12))


def test_plan_of_a_mistral_shaped_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 32768, "kv_cache_memory_bytes": 16 << 30}
    plan = LLM.plan(tmp_path, **options)
    (group,) = plan.groups
    assert plan.kv_bytes_per_token == group.bytes_per_token == 2 * 32 * 8 * 128 * 4
    assert (plan.num_blocks, group.num_layers, group.window) == (2048, 32, 4096)
    assert plan.max_sequences == group.max_sequences == 2048 / 129, "128 blocks of 32 tokens, and the one being filled"
    assert "32 layers keep a window of 4,096 tokens" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps(config | {"sliding_window": None}))
    assert LLM.plan(tmp_path, **options).max_sequences == 2048 / 1024
    assert "layers keep" not in capsys.readouterr().out
