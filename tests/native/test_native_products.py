"""Layers of torch whose products are native: the logprobs of torch, packed weights as in the native step."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.native.build import library
from nanovllm.native.formats import ProductWeight
from nanovllm.native.weights import NativeWeight
from nanovllm.runner.native_model import NativeModel
from nanovllm.runner.native_products import NativeProductsRunner
from nanovllm.weights.fp4 import Fp4Weight
from tests.helpers import model_dir, open_llm
from tests.native.planned import check_planned_bytes
from tests.native.test_step import (
    PROMPTS,
    executor_of,
    in_dtype,
    nearest,
    num_threads,
    of_pairs,
    open_packed,
    packed_file,
    scores,
)
from tests.weights.test_gpt_oss import write as write_mxfp4

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library on this machine")
__all__ = ["packed_file"]  # a fixture

FAMILIES = [
    *("deepseek-v2", "deepseek-v3"),
    *("qwen3-next", "qwen3.5", "gemma4-e"),  # with sizes that the native step does not know
]


@pytest.fixture
def without_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.native.support.reason_against", lambda *arguments, **named: "a test")


def close(ours: LLM, theirs: LLM, prompts: list[list[int]], atol: float) -> None:
    for (tokens, own), (expected, logprobs) in zip(scores(ours, prompts), scores(theirs, prompts), strict=True):
        assert tokens == expected
        np.testing.assert_allclose(own, logprobs, atol=atol)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_torch(family: str) -> None:
    with open_llm(family) as native, open_llm(family, cpu_kernels="torch") as plain:
        assert isinstance(executor_of(native), NativeProductsRunner)
        check_planned_bytes(native, model_dir(family))
        close(native, plain, PROMPTS, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_stay_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = in_dtype("gemma4-e", dtype, tmp_path)
    with open_llm(folder) as native, open_llm(folder, cpu_kernels="torch", dtype="float32") as plain:
        check_planned_bytes(native, folder)
        model = executor_of(native).model
        for weight in (model.embed_tokens.weight, model.layers[0].mixer.qkv_proj.weight):
            assert {part.data.dtype for part in weight.parts[0].values()} == {dtype}
        close(native, plain, PROMPTS, atol=1e-4)


@pytest.mark.parametrize("options", [{}, {"dtype": "float32"}, {"quantization": "int8"}], ids=str)
def test_packed_weights_as_in_the_native_step(
    options: dict[str, Any], packed_file: Path, request: pytest.FixtureRequest
) -> None:
    with open_packed(packed_file, kv_cache_dtype="float32", **options) as step:
        request.getfixturevalue("without_step")
        with open_packed(packed_file, kv_cache_dtype="float32", cpu_kernels="auto", **options) as products:
            assert isinstance(executor_of(products), NativeProductsRunner)
            check_planned_bytes(products, packed_file)
            differences = np.abs(np.array(of_pairs(products)) - np.array(of_pairs(step)))
            assert np.median(differences) < 1e-4  # a rounding that falls to the other side makes 1e-2


@pytest.mark.parametrize("runner", ["step", "products"])
def test_experts_in_mxfp4(
    runner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """As torch computes them if it rounds activations alike."""
    if runner == "products":
        request.getfixturevalue("without_step")
    files, plain_matmul = write_mxfp4(tmp_path), Fp4Weight.matmul

    def matmul(self: Fp4Weight, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        return plain_matmul(self, nearest(x), bias, expert)

    found = []
    with open_llm(files.packed, dtype="auto", kv_cache_dtype="float32") as native:
        check_planned_bytes(native, files.packed)
        assert all(one.is_packed for one in down_projections(native)) and down_projections(native)
        found.append(of_pairs(native))
    for way in (plain_matmul, matmul):
        monkeypatch.setattr(Fp4Weight, "matmul", way)
        with open_llm(files.packed, cpu_kernels="torch", dtype="float32") as plain:
            found.append(of_pairs(plain))
    ours, unrounded, alike = map(np.array, found)
    assert np.median(np.abs(ours - alike)) < 1e-4 < 1e-3 < np.median(np.abs(ours - unrounded))


def down_projections(llm: LLM) -> list[NativeWeight]:
    """Of the experts of the first layer."""
    model = executor_of(llm).model
    if isinstance(model, NativeModel):
        return [model._weights[f"model.layers.0.mlp.experts.{n}.down_proj.weight"] for n in range(6)]
    return [part for parts in model.layers[0].feed_forward.down.parts.values() for part in parts.values()]


def test_a_weight_that_the_library_cannot_hold_is_multiplied_on_torch() -> None:
    """Its experts have 40 columns, which is no multiple of 32."""
    with open_llm("gpt-oss", quantization="int4", load_format="dummy", dtype="auto") as llm:
        layer = executor_of(llm).model.layers[0]
        assert isinstance(layer.mixer.qkv_proj.weight, ProductWeight)
        assert not isinstance(layer.feed_forward.down, ProductWeight)
        scores(llm, PROMPTS)


@pytest.mark.parametrize("runner", ["step", "products"])
def test_dummy_weights_are_packed_as_the_config_says(
    runner: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    files = write_mxfp4(tmp_path)
    if runner == "products":
        request.getfixturevalue("without_step")
    with open_llm(files.packed, load_format="dummy", dtype="auto") as llm:
        assert all(one.is_packed for one in down_projections(llm)) and down_projections(llm)
        scores(llm, PROMPTS)


def test_the_dequantized_weight(packed_file: Path, without_step: None) -> None:
    plain = {"cpu_kernels": "torch", "dtype": "float32"}
    with open_packed(packed_file, cpu_kernels="auto") as packed, open_packed(packed_file, **plain) as exact:
        for own, other in zip(executor_of(packed).model.layers, executor_of(exact).model.layers, strict=True):
            for name in ("o_proj", "out_proj"):
                if hasattr(own.mixer, name):
                    weights = [getattr(one.mixer, name).weight.dequantized() for one in (own, other)]
                    torch.testing.assert_close(*weights, rtol=1e-6, atol=1e-7)


def test_a_token_id_outside_of_the_vocabulary() -> None:
    with open_llm("gemma4-e") as llm:
        embed = executor_of(llm).model.embed_tokens.weight.embed
        for token in (-1, 10**6):
            with pytest.raises(IndexError, match="not below"):
                embed(torch.tensor([0, token]))


def test_threads_end_with_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm("deepseek-v2") as first:
        scores(first, PROMPTS)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
        before = num_threads()
        with open_llm("deepseek-v2") as second:
            scores(second, PROMPTS)
            assert num_threads() == before + 4
        assert num_threads() == before
        scores(first, PROMPTS)
