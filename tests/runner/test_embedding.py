"""An embedding equals the pooled hidden state of transformers, for any number of chunks."""

import pytest
import torch

from tests.helpers import open_llm, prompt_of, reference
from tests.kernels.support import DEVICE


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_equals_transformers(family: str, pooling: str) -> None:
    prompt = prompt_of(50)
    with torch.inference_mode():
        hidden = reference(family).model(torch.tensor([prompt])).last_hidden_state[0]
    expected = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
    expected = expected / expected.norm()
    for max_num_batched_tokens in (64, 16, 8):
        with open_llm(family, device=DEVICE, max_num_batched_tokens=max_num_batched_tokens) as llm:
            found = torch.tensor(llm.embed(prompt, pooling))
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
