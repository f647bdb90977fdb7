"""Every value of a config counts: what is left out is the family's default, what is not understood is refused."""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from nanovllm.errors import CheckpointError
from nanovllm.models.registry import parse_config
from nanovllm.models.spec import ModelSpec
from tests.helpers import EVEN_FAMILIES, FAMILIES, config_of

TYPES = {family.model_type: name for name, family in (EVEN_FAMILIES | FAMILIES).items()}
# Keys that change nothing in what a model computes for text.
NO_EFFECT = {"attention_dropout", "embd_pdrop", "resid_pdrop", "initializer_range", "use_cache", "transformers_version"}
NO_EFFECT |= {"output_router_logits", "router_aux_loss_coef", "pretraining_tp", "_sliding_window_pattern"}
NO_EFFECT |= {"model_type", "pad_token_id", "bos_token_id"}
# Keys whose value another key of the same config replaces, or that a part which is missing would use.
UNUSED = {
    "deepseek_v2": {"head_dim", "qk_head_dim"},
    "deepseek_v3": {"head_dim", "qk_head_dim"},
    "gemma4_text": {"use_double_wide_mlp", "vocab_size_per_layer_input"},
    "gemma4_unified_text": {"use_double_wide_mlp"},
    "glm4_moe_lite": {"qk_head_dim", "topk_group"},
    "granitemoehybrid": {"intermediate_size", "num_experts_per_tok"},
    "phi3": {"original_max_position_embeddings", "partial_rotary_factor"},
    "qwen2": {"max_window_layers"},
    "qwen3": {"max_window_layers"},
    "qwen3_5_moe_text": {"intermediate_size"},
    "smollm3": {"no_rope_layer_interval", "max_window_layers"},
}
# What ends a sequence is in generation_config.json. DeepSeek's attention has no KV heads of its own.
NOT_COMPARED = {"architectures", "model_type", "dtype", "transformers_version", "eos_token_id"}
NO_KV_HEADS = ("deepseek_v3", "glm4_moe_lite")


def raw_config(model_type: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(config_of(TYPES[model_type]).to_json_string())
    raw.pop("time_step_limit", None)  # of Mamba layers; JSON has no infinity
    return raw | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]], "dtype": "float32"}


def parsed(raw: dict[str, Any]) -> ModelSpec | None:
    """None if it is refused."""
    try:
        return parse_config(deepcopy(raw))
    except CheckpointError:
        return None


@pytest.mark.parametrize("model_type", TYPES)
def test_what_is_left_out_is_the_default_or_refused(model_type: str) -> None:
    whole = raw_config(model_type)
    assert parsed(whole) is not None
    not_compared = NOT_COMPARED | ({"num_key_value_heads"} if model_type in NO_KV_HEADS else set())
    for key in whole.keys() - not_compared - {"mamba_d_head", "mamba_n_heads"}:
        raw = {name: value for name, value in whole.items() if name != key}
        ours = parsed(raw)
        if ours is None:
            continue
        completed = transformers.CONFIG_MAPPING[model_type].from_dict(deepcopy(raw)).to_dict()
        completed = json.loads(json.dumps(completed)) | {name: whole.get(name) for name in NOT_COMPARED}
        theirs = parsed(completed)
        if theirs is None and key == "num_key_value_heads":  # the default does not fit this tiny model
            assert ours.layers != parse_config(whole).layers or whole[key] == whole["num_attention_heads"]
            continue
        assert ours == theirs, key


def places(raw: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from places(value, (*path, key))
        else:
            yield (*path, key), value


def others(value: Any) -> list[Any]:
    """Values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, str):
        return ["unheard-of"]
    if isinstance(value, int | float):
        return [value * 2 + 2, 1 - value if value in (0, 1) else value + 1]
    if isinstance(value, list) and value:
        return [[other, *value[1:]] for other in others(value[0])]
    return []


def with_value(raw: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed = inner = deepcopy(raw)
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed


@pytest.mark.parametrize("model_type", TYPES)
def test_every_value_changes_the_model_or_is_refused(model_type: str) -> None:
    raw = raw_config(model_type)
    whole, unused = parsed(raw), UNUSED.get(model_type, set())
    ignored = set()
    for path, value in places(raw):
        found = [parsed(with_value(raw, path, other)) for other in others(value)]
        if not {path[0], path[-1]} & (NO_EFFECT | unused) and not path[0].startswith("mamba_"):
            if isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], str)):
                assert found == [None], f"{path}: a word that is not known must be refused"
            if found and all(one == whole for one in found):
                ignored.add(".".join(path))
    assert not ignored - {"use_sliding_window", "rope_parameters.original_max_position_embeddings"}


@pytest.mark.parametrize(
    ("model_type", "key", "value"),
    [  # keys of published files that transformers ignores or does not know
        ("qwen3_5_text", "attn_output_gate", False),
        ("qwen3_5_text", "output_gate_type", "sigmoid"),
        ("lfm2", "block_use_swiglu", False),
        ("lfm2", "use_pos_enc", False),
        ("granite", "normalization_function", "layernorm"),
        ("olmo2", "clip_qkv", 8.0),
        ("phi3", "lm_head_bias", True),
        ("phi3", "full_attn_mod", 2),
        ("granitemoehybrid", "layer_types", ["attention", "mamba", "attention"]),
        ("granitemoehybrid", "num_local_experts", 8),
        ("granitemoehybrid", "position_embedding_type", None),
        ("gemma4_text", "layer_types", ["sliding_attention"] * 2),
        ("gpt_oss", "rope_parameters", None),
        ("qwen3_5_moe_text", "num_experts", None),
    ],
)
def test_refused_by_name(model_type: str, key: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match=key):
        parse_config(raw_config(model_type) | {key: value})


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("Qwen4ForCausalLM", "Qwen[23]ForCausalLM"),
        ("GraniteMoeForCausalLM", "GraniteForCausalLM"),
        ("Mistral4ForConditionalGeneration", "Mistral3ForConditionalGeneration"),
        ("Gemma3nForConditionalGeneration", "Gemma3ForConditionalGeneration"),
        ("Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM|Glm4ForCausalLM"),
        ("DeepseekV32ForCausalLM", "DeepseekV[23]ForCausalLM"),
        ("Olmo2MoeForCausalLM", "Olmo2ForCausalLM"),
    ],
)
def test_a_family_that_is_not_known_names_the_nearest(architecture: str, nearest: str) -> None:
    with pytest.raises(CheckpointError, match=f"{architecture}' is not known .nearest: ({nearest})"):
        parse_config({"architectures": [architecture]})
