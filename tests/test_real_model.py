"""The default model in float32: equal to transformers on real questions, and the same tokens in every mode."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.checkpoint.gguf import GGUFFile
from tests.helpers import scheduler_of

# Questions 104, 107, 108, 116 and 122 of MT-bench (lm-sys/FastChat, Apache-2.0)
QUESTIONS = [
    "David has three sisters. Each of them has one brother. How many brothers does David have?",
    "A is the father of B. B is the father of C. What is the relationship between A and C?",
    "Which word does not belong with the others?\ntyre, steering wheel, car, engine",
    "x+y = 4z, x*y = 4z^2, express x-y in z",
    "Write a C++ program to find the nth Fibonacci number using recursion.",
]
NEAR_TIE = 1e-3  # logits this close may change order with another order of additions

pytestmark = pytest.mark.slow


def as_messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def reference(default_model_path: Path) -> transformers.PreTrainedModel:
    """The same weights in transformers."""
    with GGUFFile(default_model_path) as file:
        config = transformers.LlamaConfig(**file.hf_config())
        weights = dict(file.iter_tensors(torch.float32))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    account = model.load_state_dict(weights, assign=True, strict=False)
    assert account.missing_keys == ["lm_head.weight"] and not account.unexpected_keys
    model.tie_weights()
    model.model.rotary_emb = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    return model.eval()


@pytest.fixture(scope="module")
def answers(default_model_path: Path) -> list[RequestOutput]:
    """Generated with chunked prefill, overlapped steps, shared prefixes and preemption for lack of blocks."""
    greedy = SamplingParams(temperature=0.0, max_tokens=28, logprobs=0)
    sampled = SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=28, logprobs=0)
    options = {"max_num_batched_tokens": 48, "max_num_seqs": 8, "num_kv_cache_blocks": 20, "overlap": True}
    with open_real(default_model_path, **options) as llm:
        conversations = [as_messages(question) for question in [*QUESTIONS, *QUESTIONS[:2]]]
        outputs = llm.chat(conversations, [greedy] * 5 + [sampled] * 2, use_tqdm=False)
        assert scheduler_of(llm).num_preemptions > 0
    assert sum(output.num_cached_tokens for output in outputs) > 0
    return outputs


@pytest.fixture(scope="module")
def cold_llm(default_model_path: Path) -> Iterator[LLM]:
    with open_real(default_model_path, enable_prefix_caching=False, num_kv_cache_blocks=64) as llm:
        yield llm


def open_real(path: Path, **options: object) -> LLM:
    return LLM(path, device="cpu", dtype="float32", max_model_len=512, kv_cache_block_size=16, **options)


@torch.inference_mode()
def test_greedy_tokens_and_logprobs_equal_transformers(
    answers: list[RequestOutput], reference: transformers.PreTrainedModel
) -> None:
    for index, output in enumerate(answers):
        prompt, tokens = output.prompt_token_ids, torch.tensor(output["token_ids"])
        logits = reference(torch.tensor([prompt + output["token_ids"][:-1]])).logits[0, len(prompt) - 1 :]
        chosen = logits.gather(1, tokens[:, None])[:, 0]
        if index < len(QUESTIONS):
            assert (logits.max(dim=-1).values - chosen).max() < NEAR_TIE
            assert (logits.argmax(dim=-1) == tokens).float().mean() > 0.95
        ours = torch.tensor([entries[token].logprob for entries, token in scored(output)])
        torch.testing.assert_close(ours, chosen - logits.logsumexp(dim=-1), atol=1e-4, rtol=0)


def test_a_cold_prefill_scores_the_same_tokens_alike(answers: list[RequestOutput], cold_llm: LLM) -> None:
    texts = [output.prompt_token_ids + output["token_ids"] for output in answers]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for output, cold in zip(answers, cold_llm.generate(texts, params, use_tqdm=False), strict=True):
        assert cold.num_cached_tokens == 0 and cold.prompt_logprobs is not None
        again = cold.prompt_logprobs[len(output.prompt_token_ids) :]
        for (entries, token), scores in zip(scored(output), again, strict=True):
            assert scores is not None
            assert abs(entries[token].logprob - scores[token].logprob) < 1e-4


def test_the_capital_of_france(cold_llm: LLM) -> None:
    question = as_messages("What is the capital of France?")
    (output,) = cold_llm.chat(question, SamplingParams(temperature=0.0, max_tokens=20), use_tqdm=False)
    assert output["text"] == "The capital of France is Paris."
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)


def test_packed_weights_give_the_same_text(default_model_path: Path, cold_llm: LLM) -> None:
    """As the unpacked file, for all prompts here; a step takes about a second."""
    params = SamplingParams(temperature=0.0, max_tokens=8, prompt_logprobs=0)
    with open_real(default_model_path, quantization="gguf", num_kv_cache_blocks=64) as packed:
        pairs = zip(*(llm.generate(QUESTIONS, params, use_tqdm=False) for llm in (packed, cold_llm)), strict=True)
    for ours, expected in pairs:
        assert ours["token_ids"] == expected["token_ids"]
        assert ours.prompt_logprobs is not None and expected.prompt_logprobs is not None
        for here, there in zip(ours.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True):
            assert here is not None and there is not None and here.keys() == there.keys()
            assert all(abs(here[token].logprob - there[token].logprob) < 1e-4 for token in here)


def scored(output: RequestOutput) -> list[tuple[dict, int]]:
    """Each token with its logprobs."""
    return list(zip(output.outputs[0].logprobs or [], output["token_ids"], strict=True))
