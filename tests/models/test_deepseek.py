"""DeepSeek and GLM-4.7-Flash: what the cache holds, other routers, quantized and MTP weights, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm import LLM
from nanovllm.bench.roofline import Machine, Roofline
from nanovllm.bench.shapes import SHAPES
from nanovllm.config import Config
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.layers.grouped_moe_spec import GroupedMoeSpec
from nanovllm.models.registry import describe, parse_config
from nanovllm.native.support import reason_against
from tests.helpers import assert_greedy, copy_of, greedy_params, model_dir, open_llm, prompt_of
from tests.models.test_config import raw_config
from tests.test_proposer import TwoTokens
from tests.weights.packed_files import check_greedy, write_packed
from tests.weights.test_fp8 import WEIGHT_ONLY, pack_rows

PROMPTS = [prompt_of(length) for length in (1, 20, 47)]


@pytest.mark.parametrize("family", ["deepseek-v2-groups", "deepseek-v3-halves"])
@pytest.mark.parametrize("chunk", [8, 512])
def test_groups_of_softmax_scores_and_rotation_in_halves(family: str, chunk: int) -> None:
    with open_llm(family, max_num_batched_tokens=chunk) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(12), use_tqdm=False)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert_greedy(family, prompt, output["token_ids"])


def test_verified_rows() -> None:
    """Rows of several tokens that read the cache are computed in the absorbed form, too."""
    with open_llm("deepseek-v3") as llm:
        first = llm.generate(PROMPTS, greedy_params(12), use_tqdm=False)
    proposer = TwoTokens([prompt + output["token_ids"] for prompt, output in zip(PROMPTS, first, strict=True)])
    with open_llm("deepseek-v3", proposer=proposer) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(12), use_tqdm=False)
    assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in first]
    assert proposer.num_asked > 10


def test_the_cache_holds_latents_alone() -> None:
    for name, num_layers in (("glm-4.7-flash", 47), ("deepseek-v2-lite", 27)):
        options = {"device": "cpu", "dtype": "float32", "num_kv_cache_blocks": 4}
        for num_ranks in (1, 2):
            plan = LLM.plan(str(SHAPES / name), tensor_parallel_size=num_ranks, **options)
            assert plan.kv_bytes_per_token == num_layers * (512 + 64) * 4
    with open_llm("deepseek-v3", num_kv_cache_blocks=5) as llm:
        caches = [state.kv for state in llm.llm_engine._core.executor.states]  # type: ignore[attr-defined]
    assert [cache.numel() for cache in caches] == [5 * 16 * (24 + 16)] * 3


def test_roofline() -> None:
    model = describe(SHAPES / "deepseek-v2-lite").config
    roofline = Roofline(Machine(1.0, 1.0), model, weight_bytes=2, kv_dtype="bfloat16")
    assert roofline.kv_bytes_per_token == 27 * 576 * 2
    assert roofline.flops_per_score == 27 * 16 * 2 * (192 + 128)


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3"])
def test_fp8_checkpoint(tmp_path: Path, family: str) -> None:
    """kv_b_proj is dequantized when it is loaded."""
    check_greedy(write_packed(family, tmp_path, pack_rows, WEIGHT_ONLY))


def test_mtp_layers_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy_of("deepseek-v3", tmp_path)
    (file,) = folder.glob("*.safetensors")
    more = {f"model.layers.3.{name}.weight": torch.ones(4, 4) for name in ("eh_proj", "mlp.up_proj")}
    save_file(load_file(file) | more, file, metadata={"format": "pt"})
    with open_llm(folder) as llm:
        (output,) = llm.generate(PROMPTS[1:2], greedy_params(8), use_tqdm=False)
    assert_greedy("deepseek-v3", PROMPTS[1], output["token_ids"])
    assert "mtp (2 tensors)" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention_backend": "triton"}, "attention_backend='triton': there is no CUDA device"),
        ({"deterministic": True}, "deterministic=True is not implemented for latent attention"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype='fp8' is not implemented for latent attention"),
    ],
)
def test_refused_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_llm("deepseek-v3", **options)


def test_the_native_step_leaves_it_to_torch() -> None:
    model = describe(model_dir("glm-4.7-flash")).config
    reason = reason_against(Config(model="", device="cpu"), model, max_model_len=64)
    assert reason == "Glm4MoeLiteForCausalLM: LatentAttentionSpec is not implemented in it"


def layers_with_experts(raw: dict[str, Any]) -> list[int]:
    layers = enumerate(parse_config(raw).layers)
    return [index for index, layer in layers if isinstance(layer.feed_forward, GroupedMoeSpec)]


def test_layers_with_experts() -> None:
    v2, glm = raw_config("deepseek-v2", num_hidden_layers=7), raw_config("glm-4.7-flash")
    assert layers_with_experts(v2) == [1, 2, 3, 4, 5, 6]
    assert layers_with_experts(v2 | {"moe_layer_freq": 3}) == [3, 6]
    assert layers_with_experts(glm | {"mlp_layer_types": ["sparse", "dense", "sparse"]}) == [0, 2]
    del glm["mlp_layer_types"]
    assert layers_with_experts(glm) == [1, 2]
    assert layers_with_experts(glm | {"first_k_dense_replace": 2}) == [2]


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("deepseek-v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not implemented for DeepseekV2"),
        ("deepseek-v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not implemented for DeepseekV2"),
        ("deepseek-v2", {"mlp_bias": True}, "mlp_bias=True is not implemented"),
        ("deepseek-v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not implemented"),
        ("deepseek-v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not implemented for DeepseekV3"),
        ("deepseek-v3", {"attention_bias": True}, "attention_bias=True is not implemented for DeepseekV3"),
        ("deepseek-v3", {"n_group": 3}, "n_group=3 does not divide 8 experts"),
        ("deepseek-v3", {"n_group": 8}, "n_group=8 does not divide 8 experts, two or more in each"),
        ("deepseek-v3", {"topk_group": 5}, "topk_group=5 must be an integer of at least 1 and at most 4"),
        ("deepseek-v3", {"topk_group": 1}, "num_experts_per_tok=3 must be an integer of at least 1 and at most 2"),
        ("deepseek-v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 must be the number of heads, 4"),
        ("deepseek-v3", {"qk_rope_head_dim": 15}, "qk_rope_head_dim=15 must be even"),
        ("deepseek-v3", {"kv_lora_rank": None}, "kv_lora_rank=None must be an integer"),
        ("glm-4.7-flash", {"topk_method": "greedy"}, "topk_method='greedy' is not implemented for Glm4MoeLite"),
        ("glm-4.7-flash", {"mlp_layer_types": ["dense"]}, "must say dense or sparse for each layer"),
        ("glm-4.7-flash", {"n_shared_experts": 0}, "n_shared_experts=0 must be an integer of at least 1"),
    ],
)
def test_refused_configs(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw_config(name, **changes))
