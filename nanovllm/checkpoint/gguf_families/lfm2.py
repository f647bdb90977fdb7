"""LFM2 (dense). Layers without KV heads have a short convolution."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import GGUFFamily

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile
    from nanovllm.checkpoint.stored import Stored

KV_HEADS = "attention.head_count_kv"


def _config(file: GGUFFile, plain: dict[str, Any]) -> dict[str, Any]:
    if file.get("attention.causal") is False or file.get("attention.sliding_window"):
        raise file.refuse("metadata attention.causal or attention.sliding_window: not supported for LFM2")
    heads = file.per_layer(KV_HEADS) or [plain["num_key_value_heads"]] * plain["num_hidden_layers"]
    if len(set(heads) - {0}) != 1:
        raise file.refuse(f"metadata {KV_HEADS} is {heads}; layers with attention must all have the same number")
    return {
        "layer_types": ["full_attention" if number else "conv" for number in heads],
        "conv_L_cache": file.count("shortconv.l_cache"),
        "conv_bias": "blk.0.shortconv.conv.bias" in file.tensors,
        "norm_eps": plain["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def _tensors(file: GGUFFile, tensors: Iterable[tuple[str, Stored]]) -> Iterator[tuple[str, Stored]]:
    from nanovllm.checkpoint.gguf_families.changed import as_filters

    for name, tensor in tensors:
        yield name, as_filters(tensor) if name.endswith(".conv.conv.weight") else tensor


NAMES = {f"shortconv.{part}": f"conv.{part}" for part in ("conv", "in_proj", "out_proj")}
FAMILIES = {
    "lfm2": GGUFFamily(
        hf_class="Lfm2ForCausalLM",
        model_type="lfm2",
        names=NAMES,
        top_names={"token_embd_norm": "model.norm"},
        uneven=frozenset({KV_HEADS}),
        config=_config,
        tensors=_tensors,
    )
}
