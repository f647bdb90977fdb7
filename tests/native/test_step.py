"""The native step of a CPU: the logits of torch, the same bits alone, in a batch and in chunks, and checked indices."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm import LLM, SamplingParams
from nanovllm.errors import ConfigError
from nanovllm.models.decoder import Decoder
from nanovllm.native.build import library
from nanovllm.native.cpu import LEVELS
from nanovllm.runner.native_model import NativeModel
from nanovllm.weights.groups import GroupWeight
from nanovllm.weights.int8 import Int8Weight
from tests.helpers import copy_of, edit_config, greedy_params, model_dir, open_llm, prompt_of
from tests.native.planned import check_planned_bytes
from tests.native.sanitizers import sanitized_environment
from tests.native.test_products import rounded
from tests.test_proposer import TwoTokens
from tests.weights.test_gguf_groups import TYPES, VOCAB, write

pytestmark = pytest.mark.skipif(library() is None, reason="there is no native library on this machine")

SUPPORTED = [
    *("llama", "llama-old-rope3", "llama-dynamic", "llama-bias", "mistral", "mistral-full", "qwen2", "qwen2-sliding"),
    *("qwen2-upper-layers-slide", "qwen3", "smollm3", "qwen3-moe", "qwen3-moe-stacked"),
    *("gemma3", "granite", "granite4", "ministral3", "olmo2", "olmo3", "glm", "glm4", "phi3", "phi4-mini"),
    *("lfm2", "lfm2-attention-last", "lfm2-moe", "qwen3.5-wide", "qwen3.5-moe-wide", "qwen3-next-wide"),
    *("gpt-oss", "gpt-oss-even", "gemma4", "gemma4-e-wide", "gemma4-moe", "gemma4-unified"),
]
STATES = ["lfm2", "lfm2-attention-last", "qwen3.5-wide", "qwen3-next-wide"]  # with a state per sequence
PROMPTS = [prompt_of(45), prompt_of(1), prompt_of(33), prompt_of(16)]
PACKED_PROMPTS = [prompt_of(length, vocab_size=VOCAB) for length in (45, 1, 33, 16)]
TEXT = (
    "The river rises in the hills above the town and runs for forty miles to the sea. In spring, when the snow melts, "
    "it floods the meadows on both sides, and the farmers move their sheep to higher ground. An old stone bridge "
    "with five arches carries the road to the market; it was built in 1642 and has been repaired many times since then."
)
SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=3, logprobs=3)


@pytest.fixture(scope="module", params=TYPES)
def packed_file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of several types, as in files of type Q4_K_M."""
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    write(path, request.param, TYPES[request.param])
    return path


def open_packed(path: Path, **options: Any) -> LLM:
    small = {"device": "cpu", "max_model_len": 128, "num_kv_cache_blocks": 32, "skip_tokenizer_init": True}
    return LLM(path, **(small | {"cpu_kernels": "native"} | options))


def scores(llm: LLM, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """The greedy tokens of each prompt, and the logprobs of prompt and tokens."""
    found = []
    for output in llm.generate(prompts, SCORED, use_tqdm=False):
        entries = [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]
        ranked = [sorted((token, one.logprob) for token, one in entry.items()) for entry in entries if entry]
        found.append((output["token_ids"], [logprob for entry in ranked for _, logprob in entry]))
    return found


def nearest(x: Tensor) -> Tensor:
    codes, scale = rounded(x)
    return codes * scale.repeat_interleave(32, dim=-1)


def in_dtype(family: str, dtype: torch.dtype, folder: Path) -> Path:
    """A checkpoint whose weights are stored in 16 bits."""
    copied = copy_of(family, folder)
    for file in copied.glob("*.safetensors"):
        save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    edit_config(copied, lambda raw: raw.update(dtype=str(dtype).removeprefix("torch.")))
    return copied


def of_pairs(llm: LLM) -> list[float]:
    """The logprob of a token after another one, for many pairs."""
    prompts = [[first, second] for first in range(VOCAB) for second in (3, 20)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    return [output.prompt_logprobs[1][output.prompt_token_ids[1]].logprob for output in outputs]  # type: ignore[index]


# --- the same as torch ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SUPPORTED)
def test_logprobs_are_those_of_torch(family: str) -> None:
    with open_llm(family, cpu_kernels="native") as native, open_llm(family, cpu_kernels="torch") as plain:
        check_planned_bytes(native, model_dir(family))
        for (ours, own), (tokens, logprobs) in zip(scores(native, PROMPTS), scores(plain, PROMPTS), strict=True):
            assert ours == tokens
            np.testing.assert_allclose(own, logprobs, atol=1e-4)


@pytest.mark.parametrize(("kv_dtype", "most"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_a_kv_cache_of_16_bits(kv_dtype: str, most: float) -> None:
    """It holds what the float32 cache would hold, rounded to the nearest."""
    caches = []
    for options in ({}, {"kv_cache_dtype": kv_dtype}):
        with open_llm("qwen3", cpu_kernels="native", **options) as llm:
            logprobs = np.array(scores(llm, PROMPTS[:1])[0][1][: 3 * 44])  # of the prompt
            first = executor_of(llm).states[0].kv[:, 1:3]
            caches.append((first, logprobs))
    (full, exact), (kept, ours) = caches
    assert kept.dtype == getattr(torch, kv_dtype) and full.any()
    assert torch.equal(kept, full.to(kept.dtype))
    assert 0 < np.abs(ours - exact).mean() < most


def test_numbers_beyond_float16_are_the_largest_in_a_kv_cache(tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir("qwen3"))
    model.model.layers[0].self_attn.v_proj.weight.data *= 1e9
    model.save_pretrained(tmp_path)
    with open_llm(tmp_path, cpu_kernels="native", kv_cache_dtype="float16") as llm:
        scores(llm, PROMPTS[:1])
        values = executor_of(llm).states[0].kv[1]
        assert values.max() == 65504 == -values.min()


@pytest.mark.parametrize(
    ("level", "options", "expected"),
    [
        ("x86_64-avx512vnni", {}, "float16"),
        ("x86_64-avx512vnni", {"quantization": "int8"}, "float16"),
        ("x86_64-avx512vnni", {"dtype": "float32"}, "float32"),
        ("x86_64-avx512vnni", {"kv_cache_dtype": "bfloat16"}, "bfloat16"),
        ("x86_64-avx512", {}, "float16"),
        ("x86_64-avx2", {}, "float32"),
        ("aarch64-dotprod", {}, "float32"),
    ],
)
def test_dtype_of_the_kv_cache_beside_packed_weights(
    packed_file: Path, monkeypatch: pytest.MonkeyPatch, level: str, options: dict[str, Any], expected: str
) -> None:
    cpu = next(each for each in LEVELS if each.name == level)
    monkeypatch.setattr("nanovllm.native.support.this_cpu", lambda: cpu)
    sizes = [LLM.plan(str(packed_file), device="cpu", num_kv_cache_blocks=4, **options).kv_bytes_per_token]
    with open_packed(packed_file, **options) as llm:
        assert executor_of(llm).states[-1].kv.dtype == getattr(torch, expected)
    sizes.append(LLM.plan(str(packed_file), device="cpu", num_kv_cache_blocks=4, dtype="float32").kv_bytes_per_token)
    assert sizes[0] * (1 if expected == "float32" else 2) == sizes[1]


def test_weights_that_are_not_packed_have_an_exact_kv_cache() -> None:
    with open_llm("qwen3", cpu_kernels="native") as llm:
        assert executor_of(llm).states[0].kv.dtype == torch.float32


def test_packed_weights_with_exact_arithmetic(packed_file: Path) -> None:
    """dtype="float32" dequantizes them."""
    exact = {"dtype": "float32"}
    with open_packed(packed_file, **exact) as ours, open_packed(packed_file, cpu_kernels="torch", **exact) as plain:
        check_planned_bytes(ours, packed_file)
        for (_, own), (_, logprobs) in zip(scores(ours, PACKED_PROMPTS), scores(plain, PACKED_PROMPTS), strict=True):
            np.testing.assert_allclose(own, logprobs, atol=1e-3)


def test_packed_weights_with_rounded_activations(packed_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch computes them if it rounds activations alike. A rounding that falls to the other side makes 1e-2."""
    plain_matmul = GroupWeight.matmul

    def matmul(self: GroupWeight, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        return plain_matmul(self, nearest(x), bias, expert)

    with open_packed(packed_file, kv_cache_dtype="float32") as native:
        check_planned_bytes(native, packed_file)
        ours = of_pairs(native)
    plain = {"cpu_kernels": "torch", "quantization": "gguf", "dtype": "float32"}
    with open_packed(packed_file, **plain) as exact:
        unrounded = of_pairs(exact)
    monkeypatch.setattr(GroupWeight, "matmul", matmul)
    with open_packed(packed_file, **plain) as rounding:
        alike = of_pairs(rounding)
    errors = [float(np.median(np.abs(np.array(ours) - np.array(theirs)))) for theirs in (alike, unrounded)]
    assert errors[0] < 1e-3 < 1e-2 < errors[1]


def test_int8_made_while_loading(packed_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch computes it if it rounds activations alike."""
    monkeypatch.setattr("nanovllm.runner.device.cpu_has_bfloat16", lambda: False)  # torch would compute in it
    plain_matmul = Int8Weight.matmul

    def matmul(self: Int8Weight, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        return plain_matmul(self, nearest(x), bias, expert)

    found = []
    with open_packed(packed_file, quantization="int8", kv_cache_dtype="float32") as native:
        check_planned_bytes(native, packed_file)
        found.append(of_pairs(native))
    with open_packed(packed_file, quantization="int8", cpu_kernels="torch") as exact:
        found.append(of_pairs(exact))
    monkeypatch.setattr(Int8Weight, "matmul", matmul)
    with open_packed(packed_file, quantization="int8", cpu_kernels="torch") as rounding:
        found.append(of_pairs(rounding))
    ours, unrounded, alike = map(np.array, found)
    assert np.median(np.abs(ours - alike)) < 1e-3 < 1e-2 < np.median(np.abs(ours - unrounded))


def test_the_default_model(default_model_path: Path) -> None:
    """A real file. Activations that are rounded to 8 bits change its logprobs by a few percent."""
    runs: list[dict[str, Any]] = [
        {"cpu_kernels": "torch", "dtype": "float32"},
        {"cpu_kernels": "native", "dtype": "float32"},
        {"cpu_kernels": "native"},
    ]
    scored = []
    for options in runs:
        with LLM(default_model_path, max_model_len=512, num_kv_cache_blocks=40, **options) as llm:
            (output,) = llm.generate([TEXT], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        assert output.prompt_logprobs is not None
        pairs = zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True)
        scored.append(np.array([entry[token].logprob for token, entry in pairs if entry is not None]))
    expected, exact, rounded_inputs = scored
    np.testing.assert_allclose(exact, expected, atol=1e-3)
    assert 1e-3 < np.abs(rounded_inputs - expected).mean() < 0.1
    assert abs(rounded_inputs.mean() - expected.mean()) < 0.02


# --- one order of additions -------------------------------------------------------------------------------------------


def batches(model: str | Path, **options: Any) -> list[Any]:
    """The scores of the prompts, together and one by one."""
    packed = isinstance(model, Path)
    opened = open_packed(model, **options) if packed else open_llm(model, cpu_kernels="native", **options)
    prompts = PACKED_PROMPTS if packed else PROMPTS
    with opened as llm:
        together = scores(llm, prompts)
        assert [scores(llm, [prompt])[0] for prompt in prompts] == together
        return together


def check_batches(model: str | Path, **options: Any) -> None:
    """The same alone, together, in chunks of prompts, and preempted."""
    whole = batches(model, enable_prefix_caching=False, **options)
    assert batches(model, max_num_batched_tokens=7, max_num_seqs=4, enable_prefix_caching=False, **options) == whole
    assert batches(model, max_num_batched_tokens=16, max_num_seqs=4, num_kv_cache_blocks=8, **options) == whole


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "ministral3", "olmo3", "phi3", *STATES, "gpt-oss"])
def test_results_do_not_depend_on_the_batch(family: str) -> None:
    check_batches(family)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_results_of_packed_weights_do_not_depend_on_the_batch(kv_dtype: str, packed_file: Path) -> None:
    check_batches(packed_file, kv_cache_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("family", "window"), [("llama", None), ("mistral-full", 150), ("lfm2", None), ("qwen3.5-wide", None)]
)
def test_long_prompts_in_several_segments(family: str, window: int | None, tmp_path: Path) -> None:
    """Attention reads 128 positions at a time, and a step has parts of 256 tokens, between which convolutions go on."""
    prompt, small = prompt_of(480), {"max_model_len": 512}
    model = copy_of(family, tmp_path)
    edit_config(model, lambda config: config.update(sliding_window=window))
    with open_llm(model, cpu_kernels="native", **small) as native:
        whole = scores(native, [prompt])
    with open_llm(model, cpu_kernels="native", max_num_batched_tokens=90, **small) as chunked:
        assert scores(chunked, [prompt]) == whole
    with open_llm(model, cpu_kernels="torch", **small) as plain:
        np.testing.assert_allclose(whole[0][1], scores(plain, [prompt])[0][1], atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["lfm2", "lfm2-attention-last"])
def test_convolutions_of_weights_in_16_bits(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = in_dtype(family, dtype, tmp_path)
    with open_llm(folder, cpu_kernels="native") as native, open_llm(folder, cpu_kernels="torch") as plain:
        check_planned_bytes(native, folder)
        assert executor_of(native).model._weights["model.layers.0.conv.in_proj.weight[1]"].data.dtype == dtype
        for (ours, own), (tokens, logprobs) in zip(scores(native, PROMPTS), scores(plain, PROMPTS), strict=True):
            assert ours == tokens
            np.testing.assert_allclose(own, logprobs, atol=2e-5)


@pytest.mark.parametrize("family", STATES)
def test_a_sequence_reads_nothing_that_others_left(family: str) -> None:
    with open_llm(family, cpu_kernels="native", enable_prefix_caching=False) as llm:
        expected = scores(llm, PROMPTS)
        states = executor_of(llm)._row_states.layers
        assert states and all(state.any() for state in states)
        with torch.inference_mode():
            for state in states:
                state.fill_(float("nan"))
        assert scores(llm, PROMPTS) == expected


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5-wide"])
def test_a_row_goes_on_where_its_tokens_were_rejected(family: str) -> None:
    """Proposed tokens, some of them wrong, beside decodes and chunks: the bits of each request alone."""
    with open_llm(family, cpu_kernels="native", enable_prefix_caching=False) as llm:
        expected = [llm.generate([prompt], SCORED, use_tqdm=False)[0] for prompt in PROMPTS]
    known = [output.prompt_token_ids + output["token_ids"] for output in expected[:2]]
    proposer = TwoTokens(known)
    with open_llm(family, cpu_kernels="native", proposer=proposer, max_num_batched_tokens=12) as llm:
        found = llm.generate(PROMPTS, SCORED, use_tqdm=False)
    assert proposer.num_asked > 2
    for ours, alone in zip(found, expected, strict=True):
        assert (ours["token_ids"], ours.outputs[0].logprobs) == (alone["token_ids"], alone.outputs[0].logprobs)


# --- indices ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("tokens", 10_000, "token id"),
        ("tokens", -1, "token id"),
        ("positions", 10_000, "position"),
        ("sequences", 1, "sequence"),
        ("tables", 64, "block"),
        ("rows", 9, "row"),
        ("rows", -1, "row"),
        ("kept", 5, "wanted token"),
    ],
)
def test_a_wrong_index_is_an_error(name: str, value: int, error: str) -> None:
    with open_llm("lfm2", cpu_kernels="native") as llm:
        llm.generate([PROMPTS[1]], greedy_params(1), use_tqdm=False)  # gives the model its states
        model = executor_of(llm).model
        arrays = {"tokens": [1, 2], "positions": [0, 1], "sequences": [0, 0], "tables": [[[3]]], "kept": [0, 1]}
        arrays["rows"] = [8]
        good = {key: np.array(values, dtype=np.int32) for key, values in arrays.items()}
        model._check(**good)
        good[name].flat[-1] = value
        with pytest.raises(IndexError, match=error):
            model._check(**good)


# --- engines ----------------------------------------------------------------------------------------------------------


def executor_of(llm: LLM) -> Any:
    return llm.llm_engine._core.executor


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_the_threads_of_an_engine_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm("llama", cpu_kernels="native") as first:
        scores(first, PROMPTS)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
        before = num_threads()
        with open_llm("llama", cpu_kernels="native"):
            assert num_threads() == before + 4
        assert num_threads() == before
        scores(first, PROMPTS)


def test_two_engines_at_the_same_time() -> None:
    with open_llm("llama", cpu_kernels="native") as first, open_llm("llama", cpu_kernels="native") as second:
        expected, found = scores(first, PROMPTS), []
        other = threading.Thread(target=lambda: found.append(scores(second, PROMPTS)))
        other.start()
        assert scores(first, PROMPTS) == expected
        other.join()
        assert found == [expected]


@pytest.mark.parametrize(
    ("family", "options", "reason"),
    [
        ("gemma4-e", {}, "own input of 8 numbers"),
        ("qwen3.5", {}, "heads of 8 and 16"),
        ("deepseek-v2", {}, "LatentAttentionSpec"),
        ("llama", {"quantization": "fp8"}, "quantization='fp8'"),
        ("llama", {"quantization": "int8", "dtype": "float32"}, "round activations to 8 bits"),
        ("llama", {"attention_backend": "sdpa"}, "own attention"),
    ],
)
def test_torch_computes_what_is_not_supported(
    family: str,
    options: dict[str, Any],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(ConfigError, match=reason):
        open_llm(family, cpu_kernels="native", **options)
    with caplog.at_level(logging.INFO, "nanovllm"), open_llm(family, **options) as llm:
        assert len(llm.generate([PROMPTS[1]], greedy_params(2), use_tqdm=False)[0]["token_ids"]) == 2
    (line,) = (record.message for record in caplog.records if "native step" in record.message)
    assert reason in line


def test_bfloat16_rounds_inputs_and_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this CPU has no matrix unit, products are exact all the same, and only the cache rounds."""
    monkeypatch.setattr("nanovllm.native.support.multiplies_bfloat16", lambda: True)
    monkeypatch.setattr("nanovllm.runner.device.cpu_has_bfloat16", lambda: True)
    folder = in_dtype("llama", torch.bfloat16, tmp_path)
    with open_llm(folder, cpu_kernels="native", dtype="float32") as llm:
        exact = scores(llm, PROMPTS)
    with open_llm(folder, cpu_kernels="native", dtype="bfloat16") as llm:
        model = llm.llm_engine._core.executor.model
        assert isinstance(model, NativeModel) and (model._kv_dtype, model._rounds_inputs) == (torch.bfloat16, True)
        found = scores(llm, PROMPTS)
    for (_, ours), (_, theirs) in zip(found, exact, strict=True):
        assert 0 < np.median(np.abs(np.array(ours[:8]) - np.array(theirs[:8]))) < 0.02


def test_bfloat16_without_a_matrix_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.native.support.multiplies_bfloat16", lambda: False)
    monkeypatch.setattr("nanovllm.runner.device.cpu_has_bfloat16", lambda: True)
    with pytest.raises(ConfigError, match="matrix unit"):
        open_llm(in_dtype("llama", torch.bfloat16, tmp_path), cpu_kernels="native", dtype="bfloat16")


@pytest.mark.parametrize(("kernels", "kind"), [("auto", NativeModel), ("native", NativeModel), ("torch", Decoder)])
def test_where_it_is_chosen(kernels: str, kind: type) -> None:
    with open_llm("llama", cpu_kernels=kernels) as llm:
        assert isinstance(executor_of(llm).model, kind)


def test_no_access_out_of_bounds(tmp_path: Path) -> None:
    """Products, attention and steps with the address and undefined-behaviour sanitizers."""
    files = [f"tests/native/test_{name}.py" for name in ("products", "attention", "step")]
    steps = "gemma3 or attention-last or qwen3moe-float32 or lfm2-float32 or qwen3-next-wide"
    chosen = f"products or test_attention or the_definition or (depend_on_the_batch and ({steps}))"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", chosen]
    environment = sanitized_environment("address,undefined", cache=tmp_path) | {"HYPOTHESIS_PROFILE": "few"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
