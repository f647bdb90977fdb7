"""Packed safetensors files in the native step, against torch on the dequantized weights with inputs rounded alike."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.native.build import library
from nanovllm.runner.native_model import NativeModel
from nanovllm.weights.dense import DenseWeight
from tests.native.planned import check_planned_bytes
from tests.native.test_products import rounded as rounded_inputs
from tests.weights.packed_files import write_packed
from tests.weights.test_fp8 import pack_rows
from tests.weights.test_groups import AWQ, compressed_config, gptq_config, pack_awq, pack_compressed, pack_gptq
from tests.weights.test_int8_inputs import W8A8
from tests.weights.test_int8_inputs import pack as pack_int8
from tests.weights.test_made_while_loading import rounded as made

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library on this machine")

VOCAB = 48
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
GPTQ_8 = gptq_config(bits=8, group_size=64, sym=False)


def made_int4(weight: Tensor) -> Any:
    """What the file has is rounded while it is loaded."""
    return {"weight": weight}, made("", weight, "int4")


def pack_int8_rows(weight: Tensor) -> Any:
    return pack_int8("", weight)


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {  # how to pack, settings, quantization_config
    "awq": (pack_awq, {"size": 32}, AWQ | {"group_size": 32}),
    "gptq": (pack_gptq, {"size": 64}, gptq_config(group_size=64)),
    "gptq with 8 bits": (pack_gptq, {"size": 64, "bits": 8, "symmetric": False}, GPTQ_8),
    "compressed-tensors": (pack_compressed, {"size": 32, "dtype": torch.bfloat16}, compressed_config(group_size=32)),
    "scales of rows": (pack_compressed, {"size": 0}, compressed_config(strategy="channel", group_size=None)),
    "int8": (pack_int8_rows, {}, W8A8),
    "int4 made": (made_int4, {}, {}),
}


CONVOLUTION = {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
KINDS: dict[str, dict[str, Any]] = {"llama": {"head_dim": 32}, "lfm2": CONVOLUTION | {"tie_word_embeddings": False}}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Widths that packed weights need are multiples of 32."""
    kind = getattr(request, "param", "llama")
    sizes = {"hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": VOCAB}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = transformers.AutoConfig.for_model(kind, **sizes, **heads, **KINDS[kind], initializer_range=0.2)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("dense")
    model.save_pretrained(folder)
    return folder


def opened(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", max_model_len=64, num_kv_cache_blocks=8, skip_tokenizer_init=True, **options)


def logprobs(llm: LLM) -> np.ndarray:
    """Of the second of two tokens, for many pairs."""
    prompts = [[first, second] for first in range(VOCAB) for second in (3, 20)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return np.array([one.prompt_logprobs[1][one.prompt_token_ids[1]].logprob for one in outputs])  # type: ignore[index]


@pytest.mark.parametrize(
    ("case", "model"),
    [*((case, "llama") for case in CASES), ("awq", "lfm2"), ("int8", "lfm2"), ("int4 made", "lfm2")],
    indirect=["model"],
)
def test_layouts(case: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack, settings, config = CASES[case]
    quantization = None if config else "int4"

    def pack_module(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if module != "lm_head":
            return pack(weight, **settings)
        return None if config else ({"weight": weight}, made(module, weight, "int4"))

    files = write_packed(model, tmp_path, pack_module, config)
    exact_cache = {"kv_cache_dtype": "float32"}
    with opened(files.packed, cpu_kernels="native", quantization=quantization, **exact_cache) as llm:
        native: NativeModel = llm.llm_engine._core.executor.model
        assert all(
            held.is_packed
            for name, held in native._weights.items()
            if "proj" in name or (quantization and "head" in name)
        )
        check_planned_bytes(llm, files.packed)
        ours = logprobs(llm)
    with opened(files.dense, cpu_kernels="torch") as llm:
        unrounded = logprobs(llm)
    plain_matmul = DenseWeight.matmul

    def matmul(self: DenseWeight, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
        if self.shape[0] != VOCAB or quantization:
            codes, scale = rounded_inputs(x)
            x = codes * scale.repeat_interleave(32, dim=-1)
        return plain_matmul(self, x, *arguments, **named)

    monkeypatch.setattr(DenseWeight, "matmul", matmul)
    with opened(files.dense, cpu_kernels="torch") as llm:
        alike = logprobs(llm)
    assert np.median(np.abs(ours - alike)) < 1e-4 < 1e-3 < np.median(np.abs(ours - unrounded))


@pytest.mark.parametrize(
    ("pack", "config", "options", "reason"),
    [
        (pack_awq, AWQ, {}, "awq weights of this kind"),  # groups of 16 columns
        (pack_gptq, gptq_config(desc_act=True), {}, "gptq weights of this kind"),
        (lambda weight: pack_rows("", weight), FP8, {}, "fp8 weights of this kind"),
        (pack_int8_rows, W8A8, {"dtype": "float32"}, "round activations"),
    ],
)
def test_what_torch_computes(
    pack: Any, config: dict[str, Any], options: dict[str, Any], reason: str, model: Path, tmp_path: Path
) -> None:
    files = write_packed(model, tmp_path, lambda module, weight: None if module == "lm_head" else pack(weight), config)
    with pytest.raises(ConfigError, match=reason):
        opened(files.packed, cpu_kernels="native", **options)
