"""An embedding equals the pooled hidden state of transformers, for any number of chunks."""

import pytest
import torch

from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.pooling import Embeddings
from nanovllm.errors import RequestError
from tests.helpers import assert_greedy, greedy_params, open_llm, prompt_of, reference, scheduler_of
from tests.kernels.support import DEVICE


def expected_vector(family: str, prompt: list[int], pooling: str) -> torch.Tensor:
    with torch.inference_mode():
        hidden = reference(family).model(torch.tensor([prompt])).last_hidden_state[0]
    vector = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
    return vector / vector.norm()


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_equals_transformers(family: str, pooling: str) -> None:
    prompt = prompt_of(50)
    expected = expected_vector(family, prompt, pooling)
    for max_num_batched_tokens in (64, 16, 8):
        with open_llm(family, device=DEVICE, max_num_batched_tokens=max_num_batched_tokens) as llm:
            found = torch.tensor(llm.embed(prompt, pooling))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("overlap", [False, True])
def test_embeddings_are_scheduled_like_completions(overlap: bool) -> None:
    """In steps with chunks and decodes of others, chunked, preempted, after a prefix hit, aborted."""
    family, texts = "qwen3", [prompt_of(length) for length in (40, 33, 7, 64)]
    options = {"overlap": overlap, "max_num_batched_tokens": 6, "num_kv_cache_blocks": 7, "max_num_seqs": 4}
    with open_llm(family, **options) as llm:
        engine, embeddings = llm.llm_engine, Embeddings(llm.llm_engine)
        llm.generate(texts[0], greedy_params(4), use_tqdm=False)  # leaves the first text's blocks in the cache
        names = [engine.add_request(text, greedy_params(30)) for text in texts[:2]]
        pools = {
            embeddings.add(text, pooling, priority=1): (text, pooling) for text in texts for pooling in ("last", "mean")
        }
        engine.abort(embeddings.add(texts[0]))
        outputs = {}
        while not engine.is_finished():
            outputs |= {output.request_id: output for output in engine.step()}
        assert scheduler_of(llm).num_preemptions > 0
        for name, text in zip(names, texts, strict=False):
            assert_greedy(family, text, outputs[name]["token_ids"])
        for name, (text, pooling) in pools.items():
            vector = embeddings.take(name)
            assert vector is not None and embeddings.take(name) is None
            torch.testing.assert_close(
                torch.tensor(vector), expected_vector(family, text, pooling), atol=1e-4, rtol=1e-4
            )
        assert set(outputs) == set(names), "an embedding is no completion"
        check_scheduler(scheduler_of(llm))
        assert scheduler_of(llm).block_manager.num_available == 7


def test_the_longest_text_has_max_model_len_tokens() -> None:
    with open_llm("qwen3", max_model_len=64, num_kv_cache_blocks=8) as llm:
        assert len(llm.embed(prompt_of(64), "mean")) == llm.model_config.hidden_size
        with pytest.raises(RequestError, match="65 tokens: at least 1 and at most 64 can be embedded"):
            llm.embed(prompt_of(65))
