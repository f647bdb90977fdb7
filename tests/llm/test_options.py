"""`LLM`: the memory plan, limits, earlier spellings of options, and cache types."""

from typing import Any

import pytest
import torch

from nanovllm import LLM
from nanovllm.errors import ConfigError
from nanovllm.runner import device
from tests.helpers import TEXT_MODEL, greedy_params, model_dir, open_llm, prompt_of, reference_logprobs, scheduler_of
from tests.llm.support import one


def test_plan_tells_what_opening_takes(capsys: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 10**6}
    plan = LLM.plan(model_dir("llama"), kv_cache_block_size=16, max_model_len=128, **options)
    assert capsys.readouterr().out == f"{plan}\n"
    files = model_dir("llama").glob("*.safetensors")
    assert plan.weight_bytes <= sum(file.stat().st_size for file in files) < plan.weight_bytes + 20_000
    assert plan.kv_cache_bytes <= 10**6 < plan.kv_cache_bytes + plan.kv_bytes_per_token * 16
    assert "kv_cache_memory_bytes" in str(plan) and f"{plan.num_tokens:,} tokens" in str(plan)
    with open_llm("llama", num_kv_cache_blocks=-1, max_model_len=128, **options) as llm:
        assert scheduler_of(llm).config.num_blocks == plan.num_blocks


def test_the_plan_knows_that_the_native_step_keeps_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU with bfloat16, where torch would compute in it."""
    monkeypatch.setattr(device, "resolve_dtype", lambda *args: torch.bfloat16)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_memory_bytes": 10**6}
    planned = {
        kernels: LLM.plan(model_dir("llama"), cpu_kernels=kernels, **options).kv_bytes_per_token
        for kernels in ("auto", "torch")
    }
    assert planned["auto"] == 2 * planned["torch"]


def test_a_small_step_lowers_the_default_number_of_sequences() -> None:
    with LLM(model_dir(TEXT_MODEL), device="cpu", max_num_batched_tokens=5, num_kv_cache_blocks=64) as llm:
        assert (llm.config.max_num_batched_tokens, llm.config.max_num_seqs) == (5, 5)
        outputs = llm.generate([prompt_of(9)] * 7, greedy_params(4), use_tqdm=False)
        assert [len(output["token_ids"]) for output in outputs] == [4] * 7


def test_earlier_spellings_of_options_are_keywords_of_llm() -> None:
    old: dict[str, Any] = {"kvcache_block_size": 16, "num_kvcache_blocks": 8}
    with LLM(model_dir(TEXT_MODEL), device="cpu", max_model_len=128, **old) as llm:
        config = scheduler_of(llm).config
        assert (config.block_size, config.num_blocks) == (16, 8)
    plan = LLM.plan(model_dir(TEXT_MODEL), device="cpu", max_model_len=128, **old)
    assert (plan.block_size, plan.num_blocks) == (16, 8)
    with pytest.raises(ConfigError, match="two spellings"):
        LLM(model_dir(TEXT_MODEL), device="cpu", kv_cache_block_size=32, **old)


def test_length_is_limited_by_the_model() -> None:
    with open_llm("llama", max_model_len=4096) as llm:
        assert llm.max_model_len == 512


def test_cache_in_16_bits() -> None:
    """A 16-bit cache rounds, so logprobs are compared with a tolerance."""
    prompt = prompt_of(30)
    with open_llm("llama", kv_cache_dtype="bfloat16", max_num_batched_tokens=8) as llm:
        output = one(llm, prompt, greedy_params(1, prompt_logprobs=0))
    expected = reference_logprobs("llama", prompt)
    errors = [
        abs(entries[token].logprob - expected[i, token].item())
        for i, (token, entries) in enumerate(zip(prompt[1:], (output.prompt_logprobs or [])[1:], strict=True))
        if entries is not None
    ]
    assert 1e-5 < sum(errors) / len(errors) < 0.05
