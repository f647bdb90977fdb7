"""8-bit weights: every family generates what transformers computes with the same weights, dequantized."""

import copy
import functools
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.errors import CheckpointError
from nanovllm.weights.int8 import Int8Format, Int8Weight, dequantize_rows, quantize_rows
from tests.helpers import FAMILIES, copy_of, greedy_params, model_dir, open_llm, prompt_of, reference
from tests.layers.test_cuda_linear import Held

PROMPTS = [prompt_of(length, seed=4) for length in (5, 33, 21)]
MAX_TOKENS = 12
# The ends of the names of matrices in a layer that stay dense.
DENSE = (
    *("mlp.gate.weight", "mlp.router.weight", "router.proj.weight", "shared_expert_gate.weight", "kv_b_proj.weight"),
    *("conv.conv.weight", "conv1d.weight", "in_proj_a.weight", "in_proj_b.weight", "in_proj_ba.weight"),
)
LOGIT_ERROR = 2e-4  # between two ways to add up float32 products


@functools.cache
def dequantized_reference(name: str) -> transformers.PreTrainedModel:
    """The family's model with the weights of its linears and experts, and of a head of its own, rounded to 8 bits and
    back."""
    model = copy.deepcopy(reference(name))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            in_layer = ".layers." in weight_name or "per_layer_model_projection" in weight_name
            in_layer = in_layer and "norm" not in weight_name and not weight_name.endswith("bias")
            in_head = weight_name == "lm_head.weight"  # one that is tied has the embedding's name
            if in_head or (in_layer and not weight_name.endswith(DENSE) and weight.dim() > 1):
                transposed = model.config.model_type == "gpt_oss" and weight.dim() == 3  # [experts, in, out]
                rows = weight.transpose(1, 2) if transposed else weight
                rows.copy_(dequantize_rows(*quantize_rows(rows), torch.float32))
    return model


@torch.inference_mode()
def check_greedy(name: str, prompt: list[int], token_ids: list[int]) -> None:
    """Each token is the most likely one after those before it, up to rounding."""
    logits = dequantized_reference(name)(torch.tensor([[*prompt, *token_ids[:-1]]]), use_cache=False).logits[0]
    chosen = logits[len(prompt) - 1 :].gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    best = logits[len(prompt) - 1 :].max(dim=-1).values
    assert (best - chosen).max() < LOGIT_ERROR, name


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_equals_transformers_on_dequantized_weights(name: str) -> None:
    with open_llm(name, quantization="int8", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check_greedy(name, prompt, output["token_ids"])


def test_the_weights_do_change() -> None:
    """Guards the test above: with these weights, rounding to 8 bits moves logits by more than its tolerance."""
    token_ids = torch.tensor([PROMPTS[1]])
    with torch.inference_mode():
        exact, rounded = (model(token_ids).logits for model in (reference("llama"), dequantized_reference("llama")))
    assert (exact - rounded).abs().max() > 10 * LOGIT_ERROR


@pytest.mark.parametrize("name", ["llama-bias-even", "qwen3-moe-stacked-even"])
def test_tensor_parallel_computes_with_the_same_weights(name: str) -> None:
    with open_llm(name, quantization="int8", tensor_parallel_size=2) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(MAX_TOKENS), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        check_greedy(name, prompt, output["token_ids"])


def test_a_plan_counts_its_bytes() -> None:
    folder = str(model_dir("qwen3-moe"))
    options = {"device": "cpu", "dtype": "float32", "num_kv_cache_blocks": 4, "cpu_kernels": "torch"}
    dense, packed = LLM.plan(folder, **options), LLM.plan(folder, quantization="int8", **options)
    model = reference("qwen3-moe")
    packable = [(n, w) for n, w in model.named_parameters() if ".layers." in n or n == "lm_head.weight"]
    matrices = [w for n, w in packable if w.dim() > 1 and "mlp.gate." not in n]
    saved = sum(3 * matrix.numel() - 4 * matrix.numel() // matrix.shape[-1] for matrix in matrices)
    assert dense.weight_bytes - packed.weight_bytes == saved


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_cannot_be_represented_is_refused(tmp_path: Path, value: float) -> None:
    folder = copy_of("qwen3", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj.weight: .*8-bit"):
        open_llm(folder, quantization="int8")


@pytest.mark.parametrize("shape", [(7, 5), (3, 4, 6)])
def test_rounding_is_to_the_nearest(shape: tuple[int, ...]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    weight[..., 1, :] = 0.0
    quantized, scale = quantize_rows(weight)
    assert quantized.dtype == torch.int8 and scale.shape == shape[:-1]
    error = (dequantize_rows(quantized, scale, torch.float32) - weight).abs()
    assert (error <= 0.5001 * scale.unsqueeze(-1)).all()
    assert quantized.abs().amax(dim=-1).unique().tolist() == [0, 127]


def test_parts_of_rows_keep_the_scale_of_the_whole_row() -> None:
    whole = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    form = Int8Format()
    halves = [form.empty((6, 4), dtype=torch.float32, device=torch.device("cpu")) for _ in range(2)]
    for half, columns in zip(halves, (slice(0, 4), slice(4, 8)), strict=True):
        half.load((slice(0, 6),), Held(whole), (slice(None), columns))
    together = form.empty((6, 8), dtype=torch.float32, device=torch.device("cpu"))
    together.load((slice(0, 6),), Held(whole), ())
    assert torch.equal(torch.cat([half.dequantized() for half in halves], dim=1), together.dequantized())


@pytest.mark.parametrize("num_rows", [1, 3, 8, 9, 40])
@pytest.mark.parametrize(("num_columns", "bias"), [(32, False), (32, True), (20, False)])
def test_product_equals_that_of_dequantized_weights(num_rows: int, num_columns: int, bias: bool) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    weight = Int8Weight((10, num_columns), torch.float32, torch.device("cpu"))
    weight.load((slice(0, 10),), Held(torch.randn(10, num_columns, generator=generator)), ())
    x = torch.randn(num_rows, num_columns, generator=generator)
    added = torch.randn(10, generator=generator) if bias else None
    expected = x.double() @ weight.dequantized().double().T + (0 if added is None else added.double())
    torch.testing.assert_close(weight.matmul(x, added).double(), expected, atol=1e-5, rtol=1e-5)
