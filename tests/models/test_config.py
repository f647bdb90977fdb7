"""Configs: old and new field names mean the same, every number is read, unsupported settings are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import CheckpointError
from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.rope_spec import Llama3Scaling
from nanovllm.layers.spec import MlpSpec
from nanovllm.models.parameters import num_parameters
from nanovllm.models.registry import describe, parse_config
from tests.helpers import FAMILIES, model_dir, reference


def raw_config(name: str, **changes: Any) -> dict[str, Any]:
    return json.loads((model_dir(name) / "config.json").read_text()) | changes


@pytest.mark.parametrize("name", FAMILIES)
def test_number_of_parameters(name: str) -> None:
    ends = ("layer_scalar", "correction_bias", "expert_bias")
    stored = [buffer.numel() for full, buffer in reference(name).named_buffers() if full.endswith(ends)]
    assert num_parameters(describe(model_dir(name)).config) == reference(name).num_parameters() + sum(stored)


def test_both_spellings_of_rope_and_dtype() -> None:
    new = parse_config(raw_config("llama-rope3"))
    old = parse_config(raw_config("llama-old-rope3"))
    rope = new.layers[0].mixer.rope
    assert rope == old.layers[0].mixer.rope
    assert isinstance(rope.scaling, Llama3Scaling)
    assert (rope.scaling.factor, rope.scaling.original_length) == (8.0, 64)
    assert new.dtype == old.dtype == "float32"


def test_phi_in_older_files() -> None:
    raw = raw_config("phi4-mini")
    rope = raw.pop("rope_parameters")
    new = parse_config(raw | {"rope_parameters": rope})
    scaling = {"type": "su", "short_factor": rope["short_factor"], "long_factor": rope["long_factor"]}
    old = {"rope_theta": rope["rope_theta"], "rope_scaling": scaling, "partial_rotary_factor": 0.75}
    assert parse_config(raw | old | {"sliding_window": 262144}) == new
    assert new.layers[0].mixer.rope.rotated_dim == 12
    with pytest.raises(CheckpointError, match="short_factor of the rope must be a list of 8 numbers"):
        parse_config(raw | old | {"partial_rotary_factor": None})
    with pytest.raises(CheckpointError, match="partial_rotary_factor=0.7 must rotate an even number of a head's 16"):
        parse_config(raw | old | {"partial_rotary_factor": 0.7})


def test_glm_rotates_neighbours_in_a_half_of_each_head() -> None:
    raw = raw_config("glm4")
    raw.pop("partial_rotary_factor", None)
    raw["rope_scaling"] = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    model = parse_config(raw)
    assert model.max_position == 2048
    queries, keys, values = model.layers[0].mixer.weights()["qkv_weight"].rows
    assert queries.order == keys.order == (*range(0, 16, 2), *range(16, 24), *range(1, 16, 2), *range(24, 32))
    assert values.order == ()


def test_yarn_extends_the_longest_sequence() -> None:
    """Qwen3's documentation adds the scaling and keeps max_position_embeddings."""
    yarn = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse_config(raw_config("qwen3", rope_parameters=yarn)).max_position == 1024
    assert parse_config(raw_config("qwen3", rope_parameters=yarn, max_position_embeddings=2000)).max_position == 2000


def test_number_of_experts_under_both_names() -> None:
    raw = raw_config("qwen3-moe-stacked")
    new = parse_config(raw)
    raw["num_experts"] = raw.pop("num_local_experts")
    assert new == parse_config(raw)
    (moe,) = {layer.feed_forward for layer in new.layers if isinstance(layer.feed_forward, MoeSpec)}
    assert moe.num_experts == 6


def test_dense_layers_of_a_mixture() -> None:
    def dense_layers(name: str) -> set[int]:
        layers = parse_config(raw_config(name)).layers
        return {index for index, layer in enumerate(layers) if isinstance(layer.feed_forward, MlpSpec)}

    assert dense_layers("qwen3-moe") == {1}
    assert dense_layers("qwen3-moe-stacked") == {0, 2}


def test_windows() -> None:
    def of(raw: dict[str, Any]) -> tuple[int | None, ...]:
        return tuple(getattr(layer.mixer, "window", None) for layer in parse_config(raw).layers)

    windows = {name: of(raw_config(name)) for name in FAMILIES}
    assert windows["mistral"] == (20, 20, 20)
    assert windows["mistral-full"] == windows["llama"] == windows["qwen2"] == (None, None, None)
    assert windows["qwen2-sliding"] == (12, None, 12)
    assert windows["qwen2-upper-layers-slide"] == (None, 12, 12)
    without_types = raw_config("qwen2-upper-layers-slide")
    del without_types["layer_types"]
    assert of(without_types) == (None, 12, 12)
    without_window = raw_config("mistral")
    del without_window["sliding_window"]
    assert of(without_window) == (4096, 4096, 4096)  # as in transformers


def test_end_of_sequence_ids_of_both_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config("llama", eos_token_id=5)))
    assert describe(tmp_path).config.eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5, 9]}))
    assert describe(tmp_path).config.eos_token_ids == (7, 5, 9)
    (tmp_path / "generation_config.json").write_text("{}")
    assert describe(tmp_path).config.eos_token_ids == (5,)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not known"),
        ("llama", {"architectures": ["LLamaForCausalLM"]}, r"nearest: LlamaForCausalLM"),
        ("llama", {"architectures": None}, "'architectures' is missing"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu': only silu"),
        ("llama", {"hidden_size": 0}, "hidden_size=0 must be an integer of at least 1"),
        ("llama", {"num_hidden_layers": "three"}, "num_hidden_layers='three' must be an integer"),
        ("llama", {"vocab_size": None}, "vocab_size=None must be an integer"),
        ("llama", {"num_key_value_heads": 4}, "num_attention_heads=6 is no multiple of num_key_value_heads=4"),
        ("llama", {"dtype": "float8"}, "dtype='float8'; known: float32, bfloat16, float16"),
        ("llama", {"rope_parameters": {"rope_type": "axial"}}, "rope_type='axial' is not implemented; known: default"),
        ("llama", {"rope_scaling": {"type": "mrope"}, "rope_parameters": None}, "rope_type='mrope' is not"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "factor=None of the rope must be a finite number"),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": -2.0}}, "factor=-2.0 of the rope"),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": "4"}}, "factor='4' of the rope"),
        ("llama", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "short_factor of the rope"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "original_max_position_embeddings": 0.5}},
            "original_max_position_embeddings=0 must",
        ),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("llama", {"quantization_config": {"quant_method": "eetq"}}, "quant_method='eetq' cannot be read"),
        ("mistral", {"num_hidden_layers": "three"}, "num_hidden_layers|wrong kind"),
        ("llama", {"rms_norm_eps": None}, "wrong kind"),
        ("llama", {"rms_norm_eps": "small"}, "rms_norm_eps|wrong kind"),
        ("llama", {"rope_parameters": 7}, "wrong kind"),
        ("qwen3-moe", {"num_experts": None}, "num_experts"),
        ("qwen3-moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ("qwen3-moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ],
)
def test_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw_config(name, **changes))


@pytest.mark.parametrize(
    "key",
    [
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "vocab_size",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
    ],
)
def test_missing_key(key: str) -> None:
    raw = raw_config("qwen3-moe")
    del raw[key]
    with pytest.raises(CheckpointError, match=key):
        parse_config(raw)


@pytest.mark.parametrize(
    ("family", "named", "module"),
    [
        ("lfm2", "model.layers.0.feed_forward.w1", "model.layers.0.mlp.gate_proj"),
        ("lfm2", "self_attn.out_proj", "model.layers.1.self_attn.o_proj"),
        ("granite4", "model.layers.0.shared_mlp.output_linear", "model.layers.0.mlp.down_proj"),
    ],
)
def test_modules_that_stay_dense_may_have_the_names_of_the_files(family: str, named: str, module: str) -> None:
    quantization = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": [named]}
    packing = parse_config(raw_config(family, quantization_config=quantization)).packing
    assert packing is not None and packing.form_of(module) is None
    assert packing.form_of("model.layers.1.mlp.up_proj") is not None
