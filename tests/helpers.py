"""Tiny random models of every family, made with transformers, whose answers are the reference for the engine."""

import functools
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import torch
import transformers
from scipy import stats

from nanovllm import LLM, SamplingParams
from tests import gemma4_settings
from tests.family_settings import (
    DEEPSEEK,
    DEEPSEEK_ROPE,
    DELTA_NET,
    EXPERT_GROUPS,
    GPT_OSS,
    GRANITE,
    LLAMA3_ROPE,
    LONG_ROPE,
    MINISTRAL_ROPE,
    MOE,
    SHARED_MOE,
    WIDE_NET,
    YARN_ROPE,
)

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

TOKENIZER = Path(__file__).parent / "data" / "tokenizer"
VOCAB_SIZE = 160
BLOCK_SIZE = 16
CLEAR_MARGIN = 2e-4  # between the reference's two largest logits; rounding changes a logit by less than a tenth of this

_FOLDERS = tempfile.TemporaryDirectory(prefix="nanovllm-tests-")  # removed at the end of the test session


@dataclass(frozen=True)
class Family:
    """A config for transformers, and how its checkpoint is saved."""

    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    heads: tuple[int, int] = (4, 2)  # query heads, key-value heads
    head_dim: int = 16
    tied: bool = False
    sharded: bool = False
    old_spelling: bool = False  # rope_theta, rope_scaling and torch_dtype instead of rope_parameters and dtype
    stacked_experts: bool = False
    norm_offset: float = 0.0  # added to the stored weights of norms by the model
    signed_norm: bool = False  # the last norm has negative weights, too: else a tied head would repeat the last token
    bias: float = 0.5  # standard deviation
    seed: int = 0
    rope: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})


GEMMA3: dict[str, Any] = {"heads": (6, 2), "tied": True, "norm_offset": 1.0, "signed_norm": True, "seed": 1}
GEMMA4: dict[str, Any] = {"heads": (6, 2), "tied": True, "signed_norm": True, "rope": gemma4_settings.ROPE}

FAMILIES = {
    "llama": Family("llama", heads=(6, 2), sharded=True),
    "lfm2": Family(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "conv_bias": True,
            "norm_eps": 1e-5,
            "block_multiple_of": 16,
        },
        heads=(6, 2),
        sharded=True,
        tied=True,
        old_spelling=True,
    ),
    "lfm2-moe": Family(
        "lfm2_moe",
        {**MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1, "routed_scaling_factor": 1.5},
        heads=(6, 2),
        tied=True,
    ),
    "deepseek-v2": Family(
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1},
        heads=(4, 4),
        sharded=True,
        old_spelling=True,
        rope=DEEPSEEK_ROPE,
    ),
    "deepseek-v3": Family(
        "deepseek_v3",
        {**DEEPSEEK, **EXPERT_GROUPS, "first_k_dense_replace": 2},
        heads=(4, 4),
        rope=DEEPSEEK_ROPE,
    ),
    "glm-4.7-flash": Family(
        "glm4_moe_lite",
        {**DEEPSEEK, "q_lora_rank": 20, "v_head_dim": 28, "n_shared_experts": 1, "rms_norm_eps": 1e-3},
        heads=(6, 6),
        tied=True,
        stacked_experts=True,
        seed=1,
    ),
    "llama-old-rope3": Family("llama", heads=(4, 4), tied=True, old_spelling=True, rope=LLAMA3_ROPE),
    "llama-dynamic": Family(
        "llama", heads=(6, 2), old_spelling=True, rope={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 4.0}
    ),
    "llama-rope3": Family("llama", heads=(4, 4), rope=LLAMA3_ROPE),
    "llama-bias": Family(
        "llama",
        {"attention_bias": True, "mlp_bias": True},
        heads=(7, 1),
        rope={"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0},
    ),
    "granite": Family("granite", {**GRANITE, "rms_norm_eps": 1e-3}, heads=(6, 2), tied=True, signed_norm=True, seed=1),
    "granite4": Family(  # the dense models of Granite 4.0
        "granitemoehybrid",
        {
            "layer_types": ["full_attention"] * 3,
            "num_local_experts": 0,
            "shared_intermediate_size": 80,
            "position_embedding_type": "rope",
            "mamba_n_heads": 8,
            **GRANITE,
        },
        heads=(4, 2),
        tied=True,
        signed_norm=True,
        seed=2,
    ),
    "smollm3": Family("smollm3", {"no_rope_layers": [1, 0, 1]}, heads=(6, 2), tied=True),
    "mistral": Family("mistral", {"sliding_window": 20}, heads=(7, 1), sharded=True, old_spelling=True),
    "mistral-full": Family("mistral", {"sliding_window": None}, heads=(6, 2), tied=True),
    "ministral3": Family("ministral3", heads=(6, 2), sharded=True, rope=MINISTRAL_ROPE),
    "olmo2": Family("olmo2", {"attention_bias": True}, heads=(6, 2), bias=0.05, seed=1),
    "olmo3": Family(
        "olmo3",
        {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        heads=(6, 2),
        sharded=True,
        rope={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": YARN_ROPE,
        },
    ),
    "gpt-oss": Family("gpt_oss", GPT_OSS, heads=(6, 2), sharded=True, rope={**YARN_ROPE, "truncate": False}),
    "gemma3": Family(
        "gemma3_text",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 24,
        },
        **GEMMA3,
        rope={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        },
    ),
    "gemma4": Family("gemma4_text", gemma4_settings.DENSE, seed=1, **GEMMA4),
    "gemma4-unified": Family("gemma4_unified_text", gemma4_settings.UNIFIED, **GEMMA4),
    "gemma4-e": Family("gemma4_text", gemma4_settings.PER_LAYER, **GEMMA4),
    "gemma4-moe": Family("gemma4_text", gemma4_settings.EXPERTS, seed=1, **GEMMA4),
    "glm": Family("glm", {"partial_rotary_factor": 0.5}, heads=(6, 2), head_dim=16),
    "glm4": Family("glm4", {"partial_rotary_factor": 0.5}, head_dim=32, sharded=True, old_spelling=True),
    "phi3": Family("phi3", {"sliding_window": 20}, heads=(6, 2)),
    "phi4-mini": Family(
        "phi3",
        {"original_max_position_embeddings": 256, "partial_rotary_factor": 0.75},
        tied=True,
        sharded=True,
        rope=LONG_ROPE,
    ),
    "qwen2": Family("qwen2", heads=(7, 1), tied=True, old_spelling=True),
    "qwen2-sliding": Family(
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        heads=(3, 3),
        sharded=True,
    ),
    "qwen2-upper-layers-slide": Family(
        "qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}, heads=(6, 2)
    ),
    "qwen3": Family("qwen3", heads=(6, 2), head_dim=32, tied=True),
    "qwen3-yarn": Family("qwen3", heads=(4, 2), head_dim=32, old_spelling=True, rope=YARN_ROPE),
    "qwen3-sharded": Family("qwen3", {"attention_bias": True}, heads=(4, 4), head_dim=32, sharded=True),
    "qwen3-next": Family(
        "qwen3_next",
        {**DELTA_NET, **SHARED_MOE, "mlp_only_layers": [1]},
        head_dim=32,
        sharded=True,
        norm_offset=1.0,
    ),
    "qwen3.5": Family("qwen3_5_text", DELTA_NET, heads=(6, 2), tied=True, norm_offset=1.0),
    "qwen3-moe": Family(
        "qwen3_moe",
        {**MOE, "mlp_only_layers": [1], "norm_topk_prob": True},
        heads=(6, 2),
        head_dim=32,
        old_spelling=True,
    ),
    "qwen3-moe-stacked": Family(
        "qwen3_moe",
        {**MOE, "decoder_sparse_step": 2, "norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 20},
        heads=(7, 1),
        tied=True,
        sharded=True,
        stacked_experts=True,
    ),
}
# With numbers of heads that two ranks can divide.
EVEN_FAMILIES = {
    "deepseek-v3-halves": Family(
        "deepseek_v3", {**DEEPSEEK, **EXPERT_GROUPS, "norm_topk_prob": False, "rope_interleave": False}, heads=(4, 4)
    ),
    "deepseek-v2-groups": Family(
        "deepseek_v2",
        {**DEEPSEEK, **EXPERT_GROUPS, "topk_method": "group_limited_greedy"},
        heads=(4, 4),
    ),
    "lfm2-attention-last": Family(
        "lfm2", {"full_attn_idxs": [2], "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}, seed=1
    ),
    "qwen3.5-moe": Family("qwen3_5_moe_text", {**DELTA_NET, **SHARED_MOE}, head_dim=32, norm_offset=1.0),
    # With heads of the delta net as the native step wants them.
    "qwen3.5-wide": replace(FAMILIES["qwen3.5"], settings=WIDE_NET),
    "qwen3.5-moe-wide": Family("qwen3_5_moe_text", {**WIDE_NET, **SHARED_MOE}, head_dim=32, norm_offset=1.0),
    "qwen3-next-wide": replace(FAMILIES["qwen3-next"], settings={**WIDE_NET, **SHARED_MOE, "mlp_only_layers": [1]}),
    "lfm2-moe-even": replace(FAMILIES["lfm2-moe"], heads=(4, 2)),
    "llama-bias-even": replace(FAMILIES["llama-bias"], heads=(4, 2)),
    "gpt-oss-even": replace(FAMILIES["gpt-oss"], heads=(4, 2)),
    "granite-even": replace(FAMILIES["granite"], heads=(4, 2), seed=0),
    "ministral3-even": replace(FAMILIES["ministral3"], heads=(4, 2)),
    "gemma3-even": replace(  # which GGUF files can describe
        FAMILIES["gemma3"], settings=FAMILIES["gemma3"].settings | {"query_pre_attn_scalar": 16}, heads=(4, 2)
    ),
    "gemma4-even": replace(
        FAMILIES["gemma4"], settings=gemma4_settings.DENSE | {"num_global_key_value_heads": 2}, heads=(4, 2)
    ),
    "gemma4-e-even": replace(FAMILIES["gemma4-e"], settings=gemma4_settings.PER_LAYER_8, heads=(4, 2), seed=1),
    "gemma4-e-wide": replace(  # with an input of each layer as the native step wants it
        FAMILIES["gemma4-e"], settings=gemma4_settings.PER_LAYER | {"hidden_size_per_layer_input": 32}
    ),
    "gemma4-moe-even": replace(
        FAMILIES["gemma4-moe"], settings=gemma4_settings.EXPERTS | {"num_global_key_value_heads": 2}, heads=(4, 2)
    ),
    "mistral-even": replace(FAMILIES["mistral"], heads=(4, 1), seed=1),
    "olmo3-even": replace(FAMILIES["olmo3"], heads=(4, 1)),
    "qwen2-even": replace(FAMILIES["qwen2"], heads=(4, 1)),
    "qwen3-moe-stacked-even": replace(FAMILIES["qwen3-moe-stacked"], heads=(4, 2)),
    "gpt-oss-wide": replace(
        FAMILIES["gpt-oss"], settings={**GPT_OSS, "intermediate_size": 64}, heads=(4, 2), sharded=False
    ),
    # With 64 columns and a multiple of them, which the words of packed weights fill.
    "qwen3-wide": Family("qwen3", {"intermediate_size": 128}),
    # With experts of 64 rows and columns, which groups of 32 divide.
    "qwen3-moe-wide": Family("qwen3_moe", {**MOE, "moe_intermediate_size": 64, "norm_topk_prob": True}),
}
TEXT_MODEL = "llama-text"  # has a tokenizer and its vocabulary
TEXT_FAMILY = Family("llama", heads=(6, 2), seed=6)


def family_of(name: str) -> Family:
    return TEXT_FAMILY if name == TEXT_MODEL else (FAMILIES | EVEN_FAMILIES)[name]


# --- checkpoints ------------------------------------------------------------------------------------------------------


def config_of(name: str) -> transformers.PreTrainedConfig:
    text = name == TEXT_MODEL
    family = family_of(name)
    return transformers.AutoConfig.for_model(
        family.model_type,
        vocab_size=600 if text else VOCAB_SIZE,
        hidden_size=48 if family.head_dim == 32 else family.heads[0] * family.head_dim,
        num_attention_heads=family.heads[0],
        num_key_value_heads=family.heads[1],
        head_dim=family.head_dim,
        max_position_embeddings=512,
        tie_word_embeddings=family.tied,
        rope_parameters=dict(family.rope),
        eos_token_id=[2, 0] if text else None,
        bos_token_id=None,
        pad_token_id=None,
        **{"num_hidden_layers": 3, "intermediate_size": 80, **family.settings},
    )


@functools.cache
def reference(name: str) -> transformers.PreTrainedModel:
    """The model in transformers: float32, eager attention, every parameter random."""
    config, family = config_of(name), family_of(name)
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    set_limit(model)
    randomize(model, seed=family.seed, norm_offset=family.norm_offset, bias=family.bias)
    if family.signed_norm:
        model.model.norm.weight.data[::2].neg_().sub_(2 * family.norm_offset)  # with the offset: the negated sum
    return model


def set_limit(model: transformers.PreTrainedModel) -> None:
    """The limit of gpt-oss's activation, which older versions of transformers do not read from the config."""
    for module in model.modules():
        if hasattr(module, "limit"):
            module.limit = model.config.swiglu_limit


def randomize(model: transformers.PreTrainedModel, seed: int, norm_offset: float, bias: float = 0.5) -> None:
    """Random weights, large enough for clear argmaxes; also norms and biases, so that a test notices a missing one."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("norm.weight"):
                weight.uniform_(0.5 - norm_offset, 1.5 - norm_offset, generator=generator)
            elif name.endswith("bias"):
                weight.normal_(0.0, bias, generator=generator)
            elif name.endswith("router.scale"):  # of Gemma 4, which divides by about 10 afterwards
                weight.uniform_(5.0, 15.0, generator=generator)
            else:
                weight.normal_(0.0, 2.0 / weight.shape[-1] ** 0.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.5, generator=generator)


@functools.cache
def model_dir(name: str) -> Path:
    """The checkpoint folder of a family, written by save_pretrained."""
    folder = Path(_FOLDERS.name) / name
    family = family_of(name)
    reference(name).save_pretrained(
        folder,
        max_shard_size="100KB" if family.sharded else "1GB",
        save_original_format=not family.stacked_experts,
    )
    if name == TEXT_MODEL:
        copytree(TOKENIZER, folder, dirs_exist_ok=True)
    if family.old_spelling:
        edit_config(folder, _spell_as_before)
    return folder


def _spell_as_before(config: dict[str, Any]) -> None:
    """Rewrite a config of transformers 5 with the field names of transformers 4."""
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    config["torch_dtype"] = config.pop("dtype")
    if "num_local_experts" in config:
        config["num_experts"] = config.pop("num_local_experts")


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object], file: str = "config.json") -> None:
    path = folder / file
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def copy_of(name: str, folder: Path) -> Path:
    """A copy of a checkpoint, which a test may change."""
    return copytree(model_dir(name), folder / name)


# --- the engine -------------------------------------------------------------------------------------------------------


def open_llm(name: str | Path, **options: Any) -> LLM:
    """An engine for a family's checkpoint or a folder, with small sizes and float32 unless `options` say otherwise."""
    folder = model_dir(name) if isinstance(name, str) else name
    small = {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 8,
        "kv_cache_block_size": BLOCK_SIZE,
        "num_kv_cache_blocks": 64,
        "skip_tokenizer_init": not (folder / "tokenizer.json").exists(),
    }
    return LLM(folder, **(small | options))


def greedy_params(max_tokens: int, **settings: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **settings)


def scheduler_of(llm: LLM) -> Any:
    return llm.llm_engine.scheduler


def compiler_of(llm: LLM) -> Any:
    assert llm.llm_engine.text_params is not None
    return llm.llm_engine.text_params.compiler


def prompt_of(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, vocab_size, (length,), generator=generator).tolist()


UNLIKELY = 1e-4  # p-value below which a distribution counts as wrong; seeds are fixed, so results repeat


def assert_distributed(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square test of [draws] tokens against [vocab] probabilities; an impossible token must not occur at all."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[probabilities == 0].any(), "a token that was cut off was drawn"
    wanted = probabilities * len(tokens)
    rare = wanted < 5  # counted together: chi-square needs several draws of each kind
    counts, wanted = np.append(counts[~rare], counts[rare].sum()), np.append(wanted[~rare], wanted[rare].sum())
    possible = wanted > 0
    if possible.sum() > 1:
        assert stats.chisquare(counts[possible], wanted[possible]).pvalue > UNLIKELY


# --- the oracle -------------------------------------------------------------------------------------------------------


def assert_greedy(name: str, prompt: Sequence[int], token_ids: Sequence[int]) -> None:
    """Assert that transformers, given the prompt, generates these tokens greedily.

    One forward pass over prompt and tokens is enough: each token must be the argmax after the tokens before it.
    """
    best, margin = _argmax(name, (*prompt, *token_ids[:-1]))
    begin = len(prompt) - 1
    assert list(token_ids) == best[begin:], f"{name}, prompt {list(prompt)}"
    assert min(margin[begin:]) > CLEAR_MARGIN, f"{name}: the oracle is of two minds about {prompt}; change the seed"


@functools.cache
def _argmax(name: str, token_ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """The most likely token after each position, and the difference of its logit to the second largest."""
    (best, second), ids = (part.T for part in reference_logits(name, token_ids).topk(2))
    return ids[0].tolist(), (best - second).tolist()


def generate_by_reference(name: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
    """Tokens from transformers' own generate loop and cache."""
    answer = reference(name).generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=max_tokens,
        do_sample=False,
        eos_token_id=None,
    )
    return answer[0, len(prompt) :].tolist()


@torch.inference_mode()
def reference_logits(name: str, token_ids: Sequence[int]) -> torch.Tensor:  # [len(token_ids), vocab]
    return reference(name)(torch.tensor([list(token_ids)]), use_cache=False).logits[0]


def reference_logprobs(name: str, token_ids: Sequence[int]) -> torch.Tensor:  # [len(token_ids), vocab]
    return reference_logits(name, token_ids).log_softmax(dim=-1)
