"""LFM2 and LFM2.5 (dense): gated short convolutions in place of attention in most layers; Qwen3's attention."""

from dataclasses import replace
from typing import Any

from nanovllm.checkpoint.names import FileNames
from nanovllm.errors import CheckpointError
from nanovllm.layers.short_conv_spec import ShortConvSpec
from nanovllm.layers.spec import LayerSpec
from nanovllm.models.spec import ModelSpec, count, llama_shaped

NAMES = FileNames(
    renamed=(
        (r"\.embedding_norm\.", ".norm."),
        (r"\.operator_norm\.", ".input_layernorm."),
        (r"\.ffn_norm\.", ".post_attention_layernorm."),
        (r"\.feed_forward\.w1\.", ".mlp.gate_proj."),
        (r"\.feed_forward\.w3\.", ".mlp.up_proj."),
        (r"\.feed_forward\.w2\.", ".mlp.down_proj."),
        (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
        (r"\.([qk])_layernorm\.", r".\1_norm."),
    )
)


def spec(raw: dict[str, Any]) -> ModelSpec:
    raw = {"rope_theta": 1e6, **raw, "rms_norm_eps": raw.get("norm_eps", 1e-5), "intermediate_size": _mlp_size(raw)}
    raw["tie_word_embeddings"] = raw.get("tie_embedding", raw.get("tie_word_embeddings", True))
    model = llama_shaped(raw, qk_norm=True)
    kinds = raw.get("layer_types")
    if kinds is None:
        attends = raw.get("full_attn_idxs", range(model.num_layers))
        kinds = ["full_attention" if index in attends else "conv" for index in range(model.num_layers)]
    if len(kinds) != model.num_layers or not set(kinds) <= {"full_attention", "conv"}:
        raise CheckpointError(f"config: layer_types={kinds} must say full_attention or conv for each layer")
    conv = ShortConvSpec(
        hidden_size=model.hidden_size, kernel_size=count(raw, "conv_L_cache"), bias=bool(raw.get("conv_bias"))
    )

    def layer(own: LayerSpec, kind: str) -> LayerSpec:
        return replace(own, mixer=conv, mixer_name="conv") if kind == "conv" else own

    layers = tuple(map(layer, model.layers, kinds))
    return replace(model, layers=layers, file_names=NAMES)


def _mlp_size(raw: dict[str, Any]) -> int:
    size = count(raw, "block_ff_dim" if "block_ff_dim" in raw else "intermediate_size")
    if not raw.get("block_auto_adjust_ff_dim", True):
        return size
    size, factor = int(2 * size / 3), raw.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple = raw.get("block_multiple_of", 256)
    return -(-int(factor * size) // multiple) * multiple
