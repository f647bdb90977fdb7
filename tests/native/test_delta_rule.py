"""The gated delta rule in C against its definition on torch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nanovllm.layers import delta_rule
from nanovllm.layers.sequences import Sequences
from nanovllm.native.build import library
from nanovllm.native.delta_rule import native_delta_rule
from nanovllm.native.formats import Products
from tests.helpers import config_of, open_llm
from tests.native.test_native_products import close
from tests.native.test_step import PROMPTS, executor_of

LIBRARY = library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="there is no native library on this machine")
STRIDE = 7  # numbers between the states of two rows that belong to something else


@pytest.fixture(scope="module")
def products() -> Iterator[Products]:
    assert LIBRARY is not None
    found = Products(LIBRARY, 2)
    found.reserve(32)
    yield found
    found.close()


def sequences_of(rows: list[int], starts: list[int], sizes: list[int]) -> Sequences:
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    owners = [i for i, size in enumerate(sizes) for _ in range(size)]
    return Sequences(*(torch.tensor(each, dtype=torch.int32) for each in (rows, starts, first, sizes, owners)))


def random_inputs(num_tokens: int, heads: int, key_dim: int, value_dim: int, seed: int) -> list[Tensor]:
    """q, k, v, decay and beta; keys have length 1, as the layer gives them."""
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(num_tokens, heads, key_dim, generator=generator) for _ in range(2))
    v = torch.randn(num_tokens, heads, value_dim, generator=generator)
    decay, beta = (torch.rand(num_tokens, heads, generator=generator) for _ in range(2))
    return [q / q.norm(dim=-1, keepdim=True), k / k.norm(dim=-1, keepdim=True), v, -decay, beta]


def random_states(rows: int, heads: int, key_dim: int, value_dim: int) -> Tensor:
    size = heads * key_dim * value_dim
    all_rows = torch.randn(rows, STRIDE + size, generator=torch.Generator().manual_seed(rows))
    return all_rows[:, STRIDE:].unflatten(1, (heads, key_dim, value_dim))


@settings(max_examples=min(20, settings().max_examples))
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    heads=st.integers(1, 3),
    key_dim=st.sampled_from([4, 48, 256]),
    value_dim=st.sampled_from([32, 96]),
    new=st.integers(0, 15),
)
def test_the_definition(
    products: Products, sizes: list[int], heads: int, key_dim: int, value_dim: int, new: int
) -> None:
    rows, starts = [5, 1, 3, 2][: len(sizes)], [0 if new >> i & 1 else 10 for i in range(len(sizes))]
    inputs = random_inputs(sum(sizes), heads, key_dim, value_dim, seed=new)
    state = random_states(6, heads, key_dim, value_dim)
    expected, others = state.double(), state[[0, 4]].clone()
    before = state.clone()
    out = native_delta_rule(products, *inputs, state=state, sequences=sequences_of(rows, starts, sizes))
    parts = list(zip(*(x.split(sizes) for x in (*inputs, out)), strict=True))
    for row, start, (*own, each) in zip(rows, starts, parts, strict=True):
        held = expected[row] if start else torch.zeros_like(expected[row])
        found, after = delta_rule.steps(*(x.double() for x in own), held)
        torch.testing.assert_close(each.double(), found, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state[row].double(), after, rtol=1e-4, atol=1e-5)
    assert torch.equal(state[[0, 4]], others)
    again = before[:, :].clone()
    for position, (row, start) in enumerate(zip(rows, starts, strict=True)):  # one token after the other
        first = sum(sizes[:position])
        for token in range(first, first + sizes[position]):
            at = start if token == first else 10
            one = native_delta_rule(
                products, *(x[token : token + 1] for x in inputs), state=again, sequences=sequences_of([row], [at], [1])
            )
            assert torch.equal(one[0], out[token])
        assert torch.equal(again[row], state[row])


def test_what_an_earlier_sequence_left_is_not_read(products: Products) -> None:
    inputs = random_inputs(3, 2, 16, 32, seed=0)
    found = []
    for left in (0.0, float("nan")):
        state = torch.full((2, 2, 16, 32), left)
        found.append(native_delta_rule(products, *inputs, state=state, sequences=sequences_of([1], [0], [3])))
        assert state[1].isfinite().all()
    assert torch.equal(*found)


def test_a_model_with_it(tmp_path: Path) -> None:
    config = config_of("qwen3-next")
    config.linear_value_head_dim = 32
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    with open_llm(tmp_path) as native, open_llm(tmp_path, cpu_kernels="torch") as plain:
        assert any(getattr(layer.mixer, "_native_rule", None) for layer in executor_of(native).model.layers)
        close(native, plain, PROMPTS, atol=1e-4)
