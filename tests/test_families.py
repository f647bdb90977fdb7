"""The tiny models of helpers.py are worth comparing with: their answers depend on what they are asked."""

import pytest

from tests.checkpoint import gguf_families  # noqa: F401  # which adds families
from tests.helpers import EVEN_FAMILIES, FAMILIES, TEXT_MODEL, prompt_of, reference_logits


@pytest.mark.parametrize("family", [*FAMILIES, *EVEN_FAMILIES, TEXT_MODEL])
def test_the_next_token_is_neither_the_last_one_nor_always_the_same(family: str) -> None:
    """As it is with a tied head and embeddings that outweigh the layers, or with biases that outweigh the tokens."""
    prompt = prompt_of(50)
    best = reference_logits(family, prompt).argmax(dim=-1).tolist()
    assert sum(one == other for one, other in zip(prompt, best, strict=True)) < len(prompt) // 5
    assert len(set(best)) > len(set(prompt)) // 3
