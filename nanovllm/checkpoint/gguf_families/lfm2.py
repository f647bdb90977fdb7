"""LFM2, dense and with experts. Layers without KV heads have a short convolution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile
    from nanovllm.checkpoint.stored import Stored

KV_HEADS = "attention.head_count_kv"
SIGMOID = 2  # expert_gating_func


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    if file.get("attention.causal") is False or file.get("attention.sliding_window"):
        raise file.refuse("metadata attention.causal or attention.sliding_window: not supported for LFM2")
    heads = file.per_layer(KV_HEADS) or [plain["num_key_value_heads"]] * plain["num_hidden_layers"]
    if len(set(heads) - {0}) != 1:
        raise file.refuse(f"metadata {KV_HEADS} is {heads}; layers with attention must all have the same number")
    config = {
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "conv_L_cache": file.count("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in file.tensors,
        "norm_eps": plain["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }
    return config | _experts(file) if file.family.experts else config


def _experts(file: GGUFFile) -> dict[str, Any]:
    """The weights of the chosen experts are normalized, which the metadata does not say."""
    if file.get("expert_gating_func") != SIGMOID:
        raise file.refuse(
            f"metadata expert_gating_func is {file.get('expert_gating_func')}; it must be {SIGMOID}, sigmoid"
        )
    if file.get("expert_weights_scale") not in (None, 0.0, 1.0):
        raise file.refuse("metadata expert_weights_scale: llama.cpp does not scale the experts of lfm2moe")
    return {
        "num_dense_layers": file.get("leading_dense_block_count") or 0,
        "num_experts": file.count("expert_count"),
        "num_experts_per_tok": file.count("expert_used_count"),
        "moe_intermediate_size": file.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _tensors(file: GGUFFile, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    from nanovllm.checkpoint.gguf_families.changed import as_filters

    for name, tensor in tensors:
        yield name, as_filters(tensor) if name.endswith(".conv.conv.weight") else tensor


def _family(hf_class: str, model_type: str, *, experts: bool) -> GGUFFamily:
    return GGUFFamily(
        hf_class=hf_class,
        model_type=model_type,
        names=NAMES,
        top_names={"token_embd_norm": "model.norm"},
        experts=experts,
        uneven=frozenset({KV_HEADS}),
        config=_config,
        tensors=_tensors,
    )


NAMES = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")},
}
FAMILIES = {
    "lfm2": _family("Lfm2ForCausalLM", "lfm2", experts=False),
    "lfm2moe": _family("Lfm2MoeForCausalLM", "lfm2_moe", experts=True),
}
