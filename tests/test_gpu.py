"""The engine on a GPU: greedy tokens equal those of transformers in every mode, and closing frees all memory."""

import random
from unittest.mock import patch

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.pooling import Embeddings
from nanovllm.errors import ConfigError
from nanovllm.runner.memory_budget import cache_bytes
from nanovllm.sampling_params import StructuredOutputs
from tests.helpers import FAMILIES, TEXT_MODEL, assert_greedy, greedy_params, open_llm, prompt_of, scheduler_of
from tests.runner.test_pooling import expected_vector
from tests.test_oracle import MAX_TOKENS, PAIRS, PROMPTS
from tests.test_proposer import TwoTokens, texts_of
from tests.test_windows import PROMPTS as LONG_PROMPTS

pytestmark = pytest.mark.gpu

MIXED_PARAMS = [
    SamplingParams(temperature=0.8, seed=1, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, top_p=0.9, seed=2, max_tokens=28, ignore_eos=True),
    SamplingParams(temperature=0.7, min_p=0.05, seed=3, max_tokens=9, ignore_eos=True),
]


def open_on_gpu(family: str, **options: object) -> LLM:
    return open_llm(family, **({"device": "cuda"} | options))


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [output["token_ids"] for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("how", ["graph", "eager", "sdpa"])
@pytest.mark.parametrize(("overlap", "prefix_cache", "chunked", "tight"), PAIRS)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(family: str, overlap: int, prefix_cache: int, chunked: int, tight: int, how: str) -> None:
    llm = open_on_gpu(
        family,
        attention_backend="sdpa" if how == "sdpa" else "triton",
        enforce_eager=how == "eager",
        overlap=bool(overlap),
        enable_prefix_caching=bool(prefix_cache),
        max_num_batched_tokens=8 if chunked else 512,
        num_kv_cache_blocks=7 if tight else 64,
    )
    with llm:
        for _ in range(1 + prefix_cache):
            outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert_greedy(family, prompt, output["token_ids"])
        assert (scheduler_of(llm).num_preemptions > 0) == tight
        check_scheduler(scheduler_of(llm))


@pytest.mark.parametrize("family", ["ministral3", "gemma4-moe", "qwen3.5-moe"])
def test_starts_in_memory_that_others_have_written(family: str) -> None:
    """While kernels are compiled nothing has written their results yet, and torch may index by them."""
    for size in (1 << 8, 1 << 14, 1 << 20):  # torch's allocator keeps this memory for the engine
        written = [torch.full((size,), 1 << 30, dtype=torch.int32, device="cuda") for _ in range(64)]
        del written
    with open_on_gpu(family, num_kv_cache_blocks=64) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_greedy(family, prompt, output["token_ids"])


def test_idle_work_records_all_graphs_and_changes_no_token() -> None:
    with open_on_gpu("qwen3", overlap=True) as llm:
        decode = llm.llm_engine._core.executor._decode
        for index, _ in enumerate(llm.llm_engine.idle_work()):
            if index == 2:  # requests may come at any time
                outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
                num_recorded = len(decode.graphs._recorded)
        assert len(decode.graphs._recorded) >= 2 * len(decode._sizes) > num_recorded
        outputs += llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
    for prompt, output in zip(2 * PROMPTS, outputs, strict=True):
        assert_greedy("qwen3", prompt, output["token_ids"])


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe", "mistral", "ministral3", "gpt-oss", "gemma3"])
@pytest.mark.parametrize("overlap", [False, True])
def test_graphs_of_steps_with_prompts(family: str, overlap: bool) -> None:
    """Prompts that join running sequences, whole and in chunks, run as graphs and get the same tokens."""
    with open_on_gpu(family, overlap=overlap, max_num_batched_tokens=300, num_kv_cache_blocks=64) as llm:
        graphs = llm.llm_engine._core.executor._prompt_graphs
        assert graphs.sizes == [128, 256]
        for _ in graphs.recordings(llm.llm_engine._core.executor.states):
            pass
        with patch.object(graphs, "forward", wraps=graphs.forward) as forward:
            done = {}
            names = [llm.add_request(prompt, greedy_params(MAX_TOKENS)) for prompt in PROMPTS[:2]]
            for prompt in PROMPTS[2:]:
                done |= {output.request_id: output for output in llm.step() + llm.step()}
                names.append(llm.add_request(prompt, greedy_params(MAX_TOKENS)))
            while not llm.is_finished():
                done |= {output.request_id: output for output in llm.step()}
        assert forward.call_count >= len(PROMPTS) // 2
    for prompt, name in zip(PROMPTS, names, strict=True):
        assert_greedy(family, prompt, done[name]["token_ids"])


@pytest.mark.parametrize("how", ["graph", "eager", "sdpa", "deterministic"])
@pytest.mark.parametrize(("family", "num_blocks"), [("mistral", 5), ("mistral", 64), ("qwen2-sliding", 16)])
def test_long_prompts_through_windows(family: str, num_blocks: int, how: str) -> None:
    """Sequences much longer than their windows, in a cache that other sequences reuse block by block."""
    llm = open_on_gpu(
        family,
        attention_backend="sdpa" if how == "sdpa" else "triton",
        enforce_eager=how == "eager",
        deterministic=how == "deterministic",
        num_kv_cache_blocks=num_blocks,
    )
    with llm:
        for _ in range(2):
            outputs = llm.generate(LONG_PROMPTS, greedy_params(40), use_tqdm=False)
            for prompt, output in zip(LONG_PROMPTS, outputs, strict=True):
                assert_greedy(family, prompt, output["token_ids"])
        check_scheduler(scheduler_of(llm))


@pytest.mark.parametrize("how", ["graph", "eager"])
@pytest.mark.parametrize("overlap", [False, True])
def test_proposed_tokens_and_embeddings(overlap: bool, how: str) -> None:
    """Steps that verify proposals or pool run beside decode steps and change none of their tokens."""
    proposer = TwoTokens()
    with open_on_gpu("qwen3", overlap=overlap, enforce_eager=how == "eager", proposer=proposer) as llm:
        embeddings = Embeddings(llm.llm_engine)
        for _ in range(2):  # the second round has proposals
            name = embeddings.add(PROMPTS[0], "mean")
            outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
            for prompt, output in zip(PROMPTS, outputs, strict=True):
                assert_greedy("qwen3", prompt, output["token_ids"])
            proposer.texts = texts_of(outputs)
            vector = torch.tensor(embeddings.take(name))
            torch.testing.assert_close(vector, expected_vector("qwen3", PROMPTS[0], "mean"), atol=1e-2, rtol=1e-2)
        check_scheduler(scheduler_of(llm))


@pytest.mark.parametrize("block_size", [16, 32, 48])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_graph_a_launched_step_and_a_step_ahead_draw_the_same_tokens(dtype: str, block_size: int) -> None:
    prompts = [prompt_of(length, seed=5) for length in (3, 40, 17, 90)]
    seen = []
    for eager, overlap in [(False, True), (True, True), (False, False), (True, False)]:
        options = {"dtype": dtype, "kv_cache_block_size": block_size, "enforce_eager": eager, "overlap": overlap}
        with open_on_gpu("qwen3", **options) as llm:
            seen.append(tokens_of(llm, prompts, MIXED_PARAMS))
    assert all(tokens == seen[0] for tokens in seen)


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_dependent_launches_change_nothing(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """A kernel that starts before its predecessor ends reads nothing early that it writes; 16 rows to 1."""
    prompts = [prompt_of(5 + 6 * i, seed=13) for i in range(16)]
    params = [SamplingParams(temperature=0.9, seed=i, max_tokens=8 + 4 * i, ignore_eos=True) for i in range(16)]
    options = {"dtype": "bfloat16", "max_num_seqs": 16, "num_kv_cache_blocks": 256}
    for eager in (False, True):
        seen = []
        for dependent in (True, False):
            monkeypatch.setattr("nanovllm.kernels.features.dependent_launch", lambda dependent=dependent: dependent)
            with open_on_gpu(family, enforce_eager=eager, **options) as llm:
                seen.append(tokens_of(llm, prompts, params))
        assert seen[0] == seen[1]


def test_sampling_features_equal_those_of_the_cpu() -> None:
    """Logits processors, logprobs, top-k and top-p take another path on a GPU and give the same numbers."""
    params = [
        SamplingParams(temperature=0.9, seed=4, max_tokens=12, ignore_eos=True, logprobs=3, repetition_penalty=1.3),
        SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logit_bias={7: 2.0}, prompt_logprobs=2),
        SamplingParams(temperature=1.1, seed=6, max_tokens=12, ignore_eos=True, top_k=5, presence_penalty=0.5),
        SamplingParams(temperature=1.0, seed=7, max_tokens=12, ignore_eos=True, allowed_token_ids=[5, 6, 7, 8]),
    ]
    prompts = [prompt_of(length, seed=6) for length in (5, 33, 16, 20)]
    found = []
    for device in ("cpu", "cuda"):
        with open_llm("llama", device=device) as llm:
            found.append(llm.generate(prompts, params, use_tqdm=False))
    for cpu, gpu in zip(*found, strict=True):
        assert gpu["token_ids"] == cpu["token_ids"]
    ours, theirs = (outputs[0].outputs[0].logprobs for outputs in found)
    for a, b in zip(ours, theirs, strict=True):
        assert list(a) == list(b)
        assert all(abs(a[token].logprob - b[token].logprob) < 1e-3 for token in a)
    a, b = (outputs[1].prompt_logprobs for outputs in found)
    assert [None if x is None else list(x) for x in a] == [None if x is None else list(x) for x in b]


def test_guided_rows_among_others_equal_those_of_the_cpu() -> None:
    """Sampling waits for masks after the forward pass has started, in a step with rows that have no grammar."""
    forms: list[StructuredOutputs | None] = [
        StructuredOutputs(regex=r"\d{3}-(ab|cd)+"),
        None,
        StructuredOutputs(json={"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
        StructuredOutputs(choice=["yes", "no", "maybe"]),
    ]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=24, structured_outputs=f) for i, f in enumerate(forms)]
    params.append(
        SamplingParams(seed=9, max_tokens=24, ignore_eos=True, thinking_token_budget=4, logit_bias={597: -100})
    )
    prompts = ["a", "b c", "d", "e", "f<think>"]
    found = []
    for device, overlap in (("cpu", False), ("cuda", False), ("cuda", True)):
        with open_llm(TEXT_MODEL, device=device, overlap=overlap, skip_tokenizer_init=False) as llm:
            found.append([output["text"] for output in llm.generate(prompts, params, use_tqdm=False)])
    assert found[1] == found[0] and found[2] == found[0]
    assert found[0][3] in ("yes", "no", "maybe") and "</think>" in found[0][4]


@pytest.mark.parametrize("family", ["qwen3", "mistral", "qwen3-moe", "lfm2", "qwen3.5"])
def test_deterministic_means_the_same_bits_in_any_company(family: str) -> None:
    """A request gives the same tokens alone, in a batch, chunked, from the prefix cache and preempted, in bfloat16."""
    prompt, params = prompt_of(60, seed=9), SamplingParams(temperature=1.0, seed=8, max_tokens=40, logprobs=2)
    others = [prompt_of(length, seed=10) for length in (5, 100, 31, 64, 17, 80)]
    busy = [prompt, *others]
    ways = {
        "alone": ({}, [prompt]),
        "crowd": ({}, busy),
        "reversed": ({}, busy[::-1]),
        "chunked": ({"max_num_batched_tokens": 16}, busy),
        "tight": ({"num_kv_cache_blocks": 14}, busy),
        "eager": ({"enforce_eager": True, "overlap": False}, busy),
    }
    answers = {}
    for name, (options, prompts) in ways.items():
        with open_on_gpu(family, dtype="bfloat16", deterministic=True, **options) as llm:
            for repetition in range(2):  # the second time with the prefix cache
                outputs = llm.generate(prompts, params, use_tqdm=False)
                answer = outputs[prompts.index(prompt)].outputs[0]
                answers[name, repetition] = (answer.token_ids, [list(x.values()) for x in answer.logprobs])
            assert name != "tight" or scheduler_of(llm).num_preemptions
    first = answers["alone", 0]
    assert [name for name, answer in answers.items() if answer != first] == []


def test_fp8_keeps_to_the_point() -> None:
    """The fp8 cache takes half the memory, and the logprobs of likely tokens change little."""
    prompts = [prompt_of(length, seed=12) for length in (20, 90, 150)]
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    found = []
    for cache_dtype in ("auto", "fp8"):
        with open_on_gpu("qwen3", dtype="bfloat16", kv_cache_dtype=cache_dtype, max_num_batched_tokens=64) as llm:
            found.append([o.outputs[0].logprobs[0] for o in llm.generate(prompts, params, use_tqdm=False)])
    for exact, rounded in zip(*found, strict=True):
        for token in exact.keys() & rounded.keys():
            assert abs(exact[token].logprob - rounded[token].logprob) < 0.5
        assert len(exact.keys() & rounded.keys()) >= 3


def test_ten_thousand_requests_leave_nothing_behind() -> None:
    """Random lengths, aborts and a cache that is always too small: free blocks and memory end where they began."""
    choose = random.Random(0)
    with open_on_gpu("qwen3", num_kv_cache_blocks=40, max_num_seqs=32, max_num_batched_tokens=128) as llm:
        warm = greedy_params(4)
        tokens_of(llm, PROMPTS, [warm] * len(PROMPTS))
        torch.cuda.synchronize()
        memory, free = torch.cuda.memory_allocated(), scheduler_of(llm).block_manager.num_available
        waiting: list[str] = []
        num_added = num_ended = 0
        while num_added < 10_000 or not llm.is_finished():
            while num_added < 10_000 and llm.num_unfinished_requests < 64:
                params = SamplingParams(
                    temperature=choose.choice([0.0, 0.8]),
                    top_k=choose.choice([0, 0, 0, 10]),
                    max_tokens=choose.randint(1, 8),
                    ignore_eos=True,
                )
                waiting.append(llm.add_request(prompt_of(choose.randint(1, 40), seed=num_added % 50), params))
                num_added += 1
            if choose.random() < 0.2:
                llm.abort(choose.choice(waiting[-40:]))
            num_ended += len(llm.step())
        while llm.llm_engine._core.has_work:
            llm.step()
        assert 5_000 < num_ended < 10_000
        check_scheduler(scheduler_of(llm))
        torch.cuda.synchronize()
        assert scheduler_of(llm).block_manager.num_available == free
        assert torch.cuda.memory_allocated() == memory


def test_the_cache_is_sized_from_free_memory_and_given_back() -> None:
    torch.cuda.init()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    share = 0.2 + 1 - free / total
    with open_on_gpu("llama", num_kv_cache_blocks=-1, gpu_memory_utilization=share, max_num_seqs=2) as llm:
        # at most two sequences of 256 tokens run, so no more blocks are allocated than they need
        assert scheduler_of(llm).config.num_blocks == 2 * 256 // 16
        llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() == before


def test_other_tenants_are_respected() -> None:
    """With half of the GPU used by another program, the cache stays within what is left of gpu_memory_utilization."""
    free, total = torch.cuda.mem_get_info()
    tenant = torch.empty(int(0.5 * total), dtype=torch.uint8, device="cuda")
    try:
        with open_on_gpu("llama", num_kv_cache_blocks=-1, gpu_memory_utilization=0.7, max_num_seqs=512) as llm:
            assert cache_bytes(llm.llm_engine._core.executor.cache_size) <= 0.2 * total
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            open_on_gpu("llama", num_kv_cache_blocks=-1, gpu_memory_utilization=0.3)
    finally:
        del tenant
        torch.cuda.empty_cache()


def test_out_of_memory_names_what_to_lower() -> None:
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        open_on_gpu("llama", num_kv_cache_blocks=10**9)
    assert torch.cuda.memory_allocated() < 2**30
