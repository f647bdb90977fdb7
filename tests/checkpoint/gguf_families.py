"""Tiny models of tests/helpers.py as GGUF files, with the names and the layout of llama.cpp's converter."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from tests import gemma4_settings
from tests.checkpoint.gguf_files import finish
from tests.helpers import (
    DEEPSEEK,
    DEEPSEEK_ROPE,
    DELTA_NET,
    EVEN_FAMILIES,
    EXPERT_GROUPS,
    GPT_OSS,
    MOE,
    SHARED_MOE,
    VOCAB_SIZE,
    YARN_ROPE,
    Family,
    reference,
)

EVEN_FAMILIES |= {  # models that the metadata of GGUF files can describe
    # in every fourth layer without rope, as llama.cpp has it
    "smollm3-even": Family("smollm3", {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]}, tied=True),
    "olmo2-plain": Family("olmo2", heads=(6, 2)),  # without biases, as in llama.cpp
    "phi3-window": Family("phi3", {"sliding_window": 20, "original_max_position_embeddings": 512}, heads=(6, 2)),
    "gpt-oss-gguf": Family(  # with the limit and the alpha that llama.cpp has, and MXFP4's groups of 32 columns
        "gpt_oss",
        {**GPT_OSS, "swiglu_limit": 7.0, "intermediate_size": 64},
        rope={**YARN_ROPE, "truncate": False},
    ),
    # with heads of one size in the delta net, as in llama.cpp
    "qwen3.5-gguf": Family("qwen3_5_text", {**DELTA_NET, "linear_key_head_dim": 16}, tied=True, norm_offset=1.0),
    "qwen3-next-gguf": Family(
        "qwen3_next", {**DELTA_NET, **SHARED_MOE, "linear_key_head_dim": 16}, head_dim=32, norm_offset=1.0
    ),
    # without a factor of the experts, which llama.cpp does not know
    "lfm2-moe-gguf": Family(
        "lfm2_moe",
        {**MOE, "layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
        heads=(4, 2),
        tied=True,
    ),
    "mistral-small-3": Family("mistral", {"sliding_window": None}, heads=(6, 2)),  # queries are not scaled
    # with an mscale that equals mscale_all_dim, as in every published model
    "deepseek-v2-gguf": Family(
        "deepseek_v2",
        {**DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1},
        heads=(4, 4),
        rope=DEEPSEEK_ROPE | {"mscale": 0.7, "mscale_all_dim": 0.7},
    ),
    "deepseek-v3-gguf": Family(
        "deepseek_v3", {**DEEPSEEK, **EXPERT_GROUPS, "first_k_dense_replace": 1, "norm_topk_prob": True}, heads=(4, 4)
    ),
}

Tensors = Iterator[tuple[str, torch.Tensor]]  # Hugging Face's names
Keys = dict[str, Any]  # metadata, without the name of the architecture


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The two halves of each head in turn: for rotations of neighbours."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(weight.shape)


def permuted(config: Any, tensors: Tensors) -> Tensors:
    for name, weight in tensors:
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        yield name, weight if heads is None else permute(weight, heads)


def plain_keys(config: Any) -> Keys:
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    keys: Keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": getattr(config, "rms_norm_eps", None) or config.norm_eps,
        "rope.freq_base": rope["rope_theta"],
    }
    if getattr(config, "head_dim", None):
        keys |= {"attention.key_length": config.head_dim, "attention.value_length": config.head_dim}
    if rope["rope_type"] == "yarn":
        keys |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": rope["factor"],
            "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        }
    return keys


def granite(config: Any) -> Keys:
    return {
        "attention.scale": config.attention_multiplier,
        "embedding_scale": config.embedding_multiplier,
        "residual_scale": config.residual_multiplier,
        "logit_scale": config.logits_scaling,
    }


def olmo(config: Any) -> Keys:
    if not getattr(config, "sliding_window", None):
        return {}
    return {
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": [kind == "sliding_attention" for kind in config.layer_types],
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
    }


def phi3(config: Any) -> Keys:
    rope, head_dim = config.rope_parameters, config.hidden_size // config.num_attention_heads
    keys = {
        "rope.scaling.original_context_length": config.original_max_position_embeddings,
        "rope.dimension_count": int(head_dim * rope.get("partial_rotary_factor", 1.0)),
        "attention.sliding_window": config.sliding_window or 0,
    }
    if rope["rope_type"] == "longrope":
        stretch = config.max_position_embeddings / config.original_max_position_embeddings
        factor = 1 + np.log(stretch) / np.log(config.original_max_position_embeddings)
        keys["rope.scaling.attn_factor"] = float(np.sqrt(factor))
    return keys


def phi3_tensors(config: Any, tensors: Tensors) -> Tensors:
    yield from tensors
    if config.rope_parameters["rope_type"] == "longrope":
        for kind in ("long", "short"):
            yield f"rope_factors_{kind}.weight", torch.tensor(config.rope_parameters[f"{kind}_factor"])


def glm4(config: Any) -> Keys:
    return {"rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"])}


def gpt_oss(config: Any) -> Keys:
    return {
        "expert_count": config.num_local_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.intermediate_size,
        "attention.sliding_window": config.sliding_window,
    }


def gpt_oss_tensors(config: Any, tensors: Tensors) -> Tensors:
    """Experts as [experts, out, in], gate and up apart."""
    for name, weight in tensors:
        module, _, own = name.rpartition(".")
        if own.startswith(("gate_up_proj", "down_proj")):
            kind = "bias" if own.endswith("_bias") else "weight"
            rows = weight if kind == "bias" else weight.transpose(1, 2)
            parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if own.startswith("gate_up") else {"down": rows}
            yield from ((f"{module}.{part}_proj.{kind}", one) for part, one in parts.items())
        else:
            yield f"{name}.weight" if own == "sinks" else name, weight


def lfm2(config: Any) -> Keys:
    heads = config.num_key_value_heads
    return {
        "attention.head_count_kv": [0 if kind == "conv" else heads for kind in config.layer_types],
        "shortconv.l_cache": config.conv_L_cache,
    }


def lfm2_moe(config: Any) -> Keys:
    return lfm2(config) | {
        "leading_dense_block_count": config.num_dense_layers,
        "expert_count": config.num_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_gating_func": 2,
    }


def lfm2_tensors(config: Any, tensors: Tensors) -> Tensors:
    for name, weight in tensors:
        if ".experts." in name:
            yield from qwen3_next_tensors(config, iter([(name, weight)]))
        elif name.endswith("expert_bias"):
            yield f"{name}.bias", weight
        else:
            yield name, weight.squeeze(1) if name.endswith("conv.conv.weight") else weight


def mistral3(config: Any) -> Keys:
    rope = config.rope_parameters
    return {
        "rope.dimension_count": config.head_dim,
        "rope.scaling.yarn_beta_fast": rope.get("beta_fast"),
        "rope.scaling.yarn_log_multiplier": rope.get("mscale_all_dim"),
        "attention.temperature_scale": rope.get("llama_4_scaling_beta"),
    }


def qwen3_next(config: Any) -> Keys:
    """Every second layer has attention."""
    keys: Keys = {
        "ssm.conv_kernel": config.linear_conv_kernel_dim,
        "ssm.state_size": config.linear_key_head_dim,
        "ssm.group_count": config.linear_num_key_heads,
        "ssm.time_step_rank": config.linear_num_value_heads,
        "ssm.inner_size": config.linear_num_value_heads * config.linear_value_head_dim,
        "full_attention_interval": 2,
        "rope.dimension_count": int(config.head_dim * config.rope_parameters["partial_rotary_factor"]),
    }
    if hasattr(config, "num_experts"):
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.num_experts_per_tok,
            "expert_feed_forward_length": config.moe_intermediate_size,
            "expert_shared_feed_forward_length": config.shared_expert_intermediate_size,
        }
    return keys


def qwen3_5(config: Any) -> Keys:
    return qwen3_next(config) | {"rope.dimension_sections": [1, 1, 0, 0]}


def by_value(weight: torch.Tensor, dim: int, config: Any, first: int = 0) -> torch.Tensor:
    """From `first` on: value heads ordered by their number in a key head, then by key head."""
    keys, values = config.linear_num_key_heads, config.linear_num_value_heads
    index = torch.arange(weight.shape[dim] - first).view(keys, values // keys, -1).transpose(0, 1).flatten()
    return weight.index_select(dim, torch.cat([torch.arange(first), first + index]))


def qwen3_5_tensors(config: Any, tensors: Tensors) -> Tensors:
    first = 2 * config.linear_num_key_heads * config.linear_key_head_dim
    for name, weight in tensors:
        if ".linear_attn." in name and not name.endswith(".norm.weight"):
            columns = name.endswith("out_proj.weight")
            weight = by_value(weight, int(columns), config, first if "qkv" in name or "conv1d" in name else 0)
        yield from qwen3_next_tensors(config, iter([(name, weight)]))


def qwen3_next_tensors(config: Any, tensors: Tensors) -> Tensors:
    for name, weight in tensors:
        module = name.removesuffix(".weight")
        if name.endswith("A_log"):
            yield name, -weight.exp()
        elif name.endswith("dt_bias"):
            yield name.replace("dt_bias", "dt_proj.bias"), weight
        elif "conv1d" in name:
            yield name, weight.squeeze(1)
        elif name.endswith("norm.weight") and "linear_attn" not in name:
            yield name, weight + 1
        elif name.endswith("experts.gate_up_proj"):
            for part, one in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), one
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        elif name.endswith("in_proj_qkvz.weight"):
            keys, values = config.linear_key_head_dim, config.linear_value_head_dim
            values *= config.linear_num_value_heads // config.linear_num_key_heads
            heads = weight.unflatten(0, (config.linear_num_key_heads, -1)).split([keys, keys, values, values], dim=1)
            *qkv, gate = (head.flatten(0, 1) for head in heads)
            layer = module.split(".")[2]
            yield f"blk.{layer}.attn_qkv.weight", torch.cat(qkv)
            yield f"blk.{layer}.attn_gate.weight", gate
        else:
            yield name, weight


def deepseek(config: Any) -> Keys:
    """Heads as those of the compressed cache, which all query heads share."""
    latent, rotated = config.kv_lora_rank, config.qk_rope_head_dim
    keys: Keys = {
        "attention.head_count_kv": 1,
        "attention.key_length": latent + rotated,
        "attention.value_length": latent,
        "attention.key_length_mla": config.qk_nope_head_dim + rotated,
        "attention.value_length_mla": config.v_head_dim,
        "attention.kv_lora_rank": latent,
        "attention.q_lora_rank": config.q_lora_rank,
        "rope.dimension_count": rotated,
        "leading_dense_block_count": getattr(config, "first_k_dense_replace", 1),
        "expert_count": config.n_routed_experts,
        "expert_used_count": config.num_experts_per_tok,
        "expert_shared_count": config.n_shared_experts,
        "expert_feed_forward_length": config.moe_intermediate_size,
        "expert_weights_scale": float(config.routed_scaling_factor),
        "rope.scaling.yarn_log_multiplier": 0.1 * config.rope_parameters.get("mscale_all_dim", 0.0) or None,
    }
    if config.model_type != "deepseek_v2":
        keys |= {"expert_gating_func": 2, "expert_weights_norm": config.norm_topk_prob}
        keys |= {"expert_group_count": config.n_group, "expert_group_used_count": config.topk_group}
    return keys


def deepseek_tensors(config: Any, tensors: Tensors) -> Tensors:
    for name, weight in tensors:
        if name.endswith("kv_b_proj.weight"):
            heads = weight.unflatten(0, (config.num_attention_heads, -1))
            keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
            yield name.replace("kv_b", "k_b"), keys.transpose(1, 2)
            yield name.replace("kv_b", "v_b"), values
        elif ".experts." in name:
            yield from qwen3_next_tensors(config, iter([(name, weight)]))
        else:
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), weight


def gemma4(config: Any) -> Keys:
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    many, whole = config.num_key_value_heads, gemma4_settings.ALL["global_head_dim"]
    few = gemma4_settings.DENSE["num_global_key_value_heads"] if config.attention_k_eq_v else many
    shared, width = config.num_kv_shared_layers, config.intermediate_size
    wide = [width] * (config.num_hidden_layers - shared) + [2 * width] * shared
    keys: Keys = {
        "attention.key_length": whole,
        "attention.value_length": whole,
        "attention.key_length_swa": config.head_dim,
        "attention.value_length_swa": config.head_dim,
        "attention.head_count_kv": [many if one else few for one in windowed],
        "attention.sliding_window": config.sliding_window,
        "attention.sliding_window_pattern": windowed,
        "attention.shared_kv_layers": shared,
        "rope.freq_base_swa": config.rope_parameters["sliding_attention"]["rope_theta"],
        "rope.dimension_count": whole,
        "rope.dimension_count_swa": config.head_dim,
        "embedding_length_per_layer_input": config.hidden_size_per_layer_input or 0,
        "final_logit_softcapping": config.final_logit_softcapping,
    }
    if config.use_double_wide_mlp:
        keys["feed_forward_length"] = wide
    if config.enable_moe_block:
        keys |= {
            "expert_count": config.num_experts,
            "expert_used_count": config.top_k_experts,
            "expert_feed_forward_length": config.moe_intermediate_size,
        }
    return keys


def gemma4_tensors(config: Any, tensors: Tensors) -> Tensors:
    for name, weight in tensors:
        layer, own = (*name.split("."), "")[2], name.rpartition(".")[2]
        if own == "layer_scalar" or (".experts." in name and own != "weight"):
            yield f"{name}.weight", weight
        elif name.endswith("router.scale"):
            yield f"blk.{layer}.ffn_gate_inp.scale", weight
        elif own == "per_expert_scale":
            yield f"blk.{layer}.ffn_down_exps.scale", weight
        else:
            yield name, weight
    half = gemma4_settings.ALL["global_head_dim"] // 2
    rotated = int(half * config.rope_parameters["full_attention"]["partial_rotary_factor"])
    yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (half - rotated))


def no_keys(config: Any) -> Keys:
    return {}


def as_they_are(config: Any, tensors: Tensors) -> Tensors:
    yield from tensors


# architecture: the keys that it has beyond the plain ones, and what the converter does to its tensors
Recipe = tuple[Callable[[Any], Keys], Callable[[Any, Tensors], Tensors]]
RECIPES: dict[str, Recipe] = {
    "deepseek2": (deepseek, deepseek_tensors),
    "gemma4": (gemma4, gemma4_tensors),
    "glm4": (glm4, as_they_are),
    "gpt-oss": (gpt_oss, gpt_oss_tensors),
    "granite": (granite, permuted),
    "lfm2": (lfm2, lfm2_tensors),
    "lfm2moe": (lfm2_moe, lfm2_tensors),
    "mistral3": (mistral3, permuted),
    "olmo2": (olmo, as_they_are),
    "phi3": (phi3, phi3_tensors),
    "qwen35": (qwen3_5, qwen3_5_tensors),
    "qwen35moe": (qwen3_5, qwen3_5_tensors),
    "qwen3next": (qwen3_next, qwen3_next_tensors),
    "smollm3": (no_keys, permuted),
}


def gguf_tensors(name: str, architecture: str) -> Tensors:
    """GGUF's names and tensors, in float32."""
    model, (_, change) = reference(name), RECIPES[architecture]
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, model.config.num_hidden_layers)
    for hf_name, weight in change(model.config, iter(model.state_dict().items())):
        if model.config.tie_word_embeddings and hf_name == "lm_head.weight":
            continue
        mapped = hf_name if hf_name.startswith(("blk.", "rope_")) else names.get_name(hf_name, (".weight", ".bias"))
        assert mapped is not None, hf_name
        yield mapped, weight.float().contiguous()


def write_family(
    path: Path, name: str, architecture: str, *, packed: str | None = None, more: tuple[str, ...] = (), **changed: Any
) -> Path:
    """`packed`: the type of matrices, where their columns allow it. `more`: names of vectors that are added. `changed`:
    metadata, "__" for "."."""
    config, (keys, _) = copy.deepcopy(reference(name).config), RECIPES[architecture]
    config.allow_global_per_layer_attribute_access = True  # transformers asks for this where layers differ
    writer = gguf.GGUFWriter(path, architecture)
    metadata = plain_keys(config) | keys(config) | {key.replace("__", "."): value for key, value in changed.items()}
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in metadata.items():
        if value is not None:
            add[type(value)](f"{architecture}.{key}", value)
    add_tokens(writer)
    for tensor, weight in gguf_tensors(name, architecture):
        kind = None
        if packed is not None and weight.ndim > 1 and weight.shape[-1] % 32 == 0 and "norm" not in tensor:
            kind = gguf.GGMLQuantizationType[packed]
        array = weight.numpy()
        writer.add_tensor(tensor, array if kind is None else gguf.quants.quantize(array, kind), raw_dtype=kind)
    for tensor in more:
        writer.add_tensor(tensor, np.zeros(32, dtype=np.float32))
    finish(writer)
    return path


def add_tokens(writer: gguf.GGUFWriter) -> None:
    """Words without meaning, which llama.cpp asks for."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([chr(ord("a") + index % 26) + str(index) for index in range(VOCAB_SIZE)])
    writer.add_token_types([1] * VOCAB_SIZE)
    writer.add_token_merges(["a 1"])
    writer.add_eos_token_id(1)
