"""Drawing from the whole vocabulary in C: the token that torch draws with the same noise."""

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanovllm import SamplingParams
from nanovllm.layers.noise import gumbel
from nanovllm.native.build import library
from tests.helpers import open_llm, prompt_of

LIBRARY = library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no native library on this machine")


@given(
    vocab=st.integers(2, 3000),
    temperature=st.sampled_from([0.01, 0.6, 1.0, 5.0, 1000.0]),
    spread=st.sampled_from([0.0, 1.0, 8.0, 100.0]),
    key=st.integers(0, 2**32 - 1),
)
def test_the_token_is_that_of_torch(vocab: int, temperature: float, spread: float, key: int) -> None:
    assert LIBRARY is not None
    LIBRARY.draw_token.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_uint32]
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    logits[vocab // 3] = float("-inf")
    scores = logits / torch.tensor(temperature) + gumbel(torch.tensor([key]), torch.arange(vocab))[0]
    token = LIBRARY.draw_token(logits.data_ptr(), vocab, temperature, key)
    assert scores.max() - scores[token] <= 1e-5 * max(1.0, abs(float(scores.max())))


@given(vocab=st.integers(1, 200), seed=st.integers(0, 1000), few=st.booleans())
def test_the_most_likely_token(vocab: int, seed: int, few: bool) -> None:
    """The first of equal ones; `few` different logits."""
    assert LIBRARY is not None
    LIBRARY.most_likely_token.argtypes = [ctypes.c_void_p, ctypes.c_int32]
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(seed))
    logits = logits.round() if few else logits
    logits[vocab // 3] = float("-inf")
    assert LIBRARY.most_likely_token(logits.data_ptr(), vocab) == int(logits.argmax())


def test_an_engine_draws_what_torch_draws() -> None:
    """Plain rows, batches of plain, cut and greedy ones, and of plain and greedy ones."""
    batches = [
        [SamplingParams(temperature=t, seed=i, max_tokens=8, ignore_eos=True) for i, t in enumerate((0.7, 1.0, 3.0))],
        [
            SamplingParams(temperature=t, top_k=k, seed=5, max_tokens=8, ignore_eos=True)
            for t, k in ((0, 0), (1, 3), (1, 0))
        ],
        [SamplingParams(temperature=t, seed=5, max_tokens=8, ignore_eos=True) for t in (0, 1, 0)],
    ]
    found = []
    for kernels in ("native", "torch"):
        with open_llm("llama", cpu_kernels=kernels) as llm:
            prompts = [prompt_of(length) for length in (3, 9, 20)]
            found.append([[o["token_ids"] for o in llm.generate(prompts, each, use_tqdm=False)] for each in batches])
    assert found[0] == found[1]
