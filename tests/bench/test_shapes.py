"""Shapes: configs equal to those of the published models, and how to select them."""

from dataclasses import replace
from pathlib import Path

import pytest

from nanovllm.bench.shapes import shape_folder, shape_names, with_shape
from nanovllm.checkpoint.json_file import read_json
from nanovllm.cli.main import main
from nanovllm.errors import ConfigError
from nanovllm.layers.latent_spec import LatentAttentionSpec
from nanovllm.layers.rope_spec import Llama3Scaling
from nanovllm.layers.shared_kv_spec import SharedKvAttentionSpec
from nanovllm.layers.spec import AttentionSpec, RopeSpec
from nanovllm.models.parameters import num_parameters
from nanovllm.models.registry import describe, parse_config
from nanovllm.models.spec import ModelSpec

NUM_PARAMETERS = {
    "deepseek-v2-lite": 15_706_484_224,
    "gemma-3-12b": 11_766_034_176,
    "gemma-4-26b-a4b": 25_233_141_790,
    "gemma-4-e4b": 7_463_013_418,
    "glm-4.7-flash": 29_943_393_920,
    "gpt-oss-20b": 20_914_757_184,
    "lfm2-1.2b": 1_170_340_608,
    "llama-3.1-8b": 8_030_261_248,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3.5-9b": 8_953_803_264,
    "qwen3.6-35b-a3b": 34_660_610_688,
    "smollm2-135m": 134_515_008,
}


def read_shape(name: str) -> ModelSpec:
    return parse_config(read_json(shape_folder(name) / "config.json"))


def attention_of(model: ModelSpec) -> AttentionSpec:
    """That of the first layer that has one."""
    return next(layer.mixer for layer in model.layers if isinstance(layer.mixer, AttentionSpec))


def test_there_are_these() -> None:
    assert shape_names() == list(NUM_PARAMETERS)


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_number_of_parameters(name: str) -> None:
    config = read_shape(name)
    assert num_parameters(config) == NUM_PARAMETERS[name]
    assert config.dtype == "bfloat16"


@pytest.mark.parametrize("name", NUM_PARAMETERS)
def test_transformers_reads_the_same(name: str) -> None:
    """transformers builds the same model from the same file, which the number of parameters alone does not prove."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    theirs = AutoConfig.from_pretrained(shape_folder(name))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(theirs)
    ends = ("e_score_correction_bias", "layer_scalar")  # of weights that are buffers there
    buffers = [buffer.numel() for found, buffer in model.named_buffers() if found.endswith(ends)]
    assert model.num_parameters() + sum(buffers) == NUM_PARAMETERS[name]
    ours, attention = read_shape(name), attention_of(read_shape(name))
    layers = getattr(theirs, "layer_types", None) or ["every layer"] * ours.num_layers
    ropes = (
        theirs.rope_parameters if layers[0] in theirs.rope_parameters else dict.fromkeys(layers, theirs.rope_parameters)
    )
    for index, (kind, layer) in enumerate(zip(layers, ours.layers, strict=True)):
        if kind in ("conv", "linear_attention"):
            assert not isinstance(layer.mixer, AttentionSpec)
            continue
        mixer = layer.mixer.attention if isinstance(layer.mixer, SharedKvAttentionSpec) else layer.mixer
        if "gemma-4" in name:
            own = theirs.per_layer_config[index]
            assert (mixer.head_dim, mixer.num_kv_heads) == (own.head_dim, own.num_key_value_heads)
            assert (mixer is not layer.mixer) == (theirs.kv_sharing_modes[index] == "reuse")
        else:
            assert mixer == replace(attention, window=mixer.window, rope=mixer.rope)
            latent = isinstance(attention, LatentAttentionSpec)
            assert mixer.num_kv_heads == (1 if latent else theirs.num_key_value_heads)
        assert mixer.window == (theirs.sliding_window if kind == "sliding_attention" else None)
        assert mixer.rope.theta == ropes[kind]["rope_theta"]
        assert getattr(mixer.rope.scaling, "factor", 1.0) == ropes[kind].get("factor", 1.0)
    assert theirs.num_attention_heads == attention.num_heads
    eps = theirs.norm_eps if "lfm2" in name else theirs.rms_norm_eps
    assert (eps, theirs.max_position_embeddings) == (ours.norm_eps, ours.max_position)


def test_rotation_of_llama() -> None:
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_length=8192)
    assert attention_of(read_shape("llama-3.1-8b")).rope == RopeSpec(theta=500_000.0, scaling=scaling)


def test_small_shape_is_that_of_the_default_model(default_model_path: Path) -> None:
    theirs = describe(default_model_path).config
    mixer, eps = attention_of(theirs), float(f"{theirs.norm_eps:.6g}")
    mixer = replace(mixer, rope=replace(mixer.rope, theta=float(f"{mixer.rope.theta:.6g}")))
    layers = tuple(replace(layer, mixer=mixer, norm_eps=eps) for layer in theirs.layers)
    rounded = replace(theirs, norm_eps=eps, layers=layers)
    assert replace(rounded, eos_token_ids=(), packing=None) == read_shape("smollm2-135m")


def test_shape_becomes_the_model() -> None:
    engine = with_shape({"seed": 3}, "qwen3-8b")
    assert engine == {
        "seed": 3,
        "model": str(shape_folder("qwen3-8b")),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
    }
    assert with_shape({"load_format": "dummy"}, "qwen3-8b")["load_format"] == "dummy"
    assert with_shape({"tokenizer": "folder"}, "qwen3-8b")["skip_tokenizer_init"] is False
    assert with_shape({"seed": 3}, None) == {"seed": 3}


@pytest.mark.parametrize(
    ("name", "near"), [("qwen3-0.6", "qwen3-0.6b"), ("Qwen3-30B-A3", "qwen3-30b-a3b"), ("llama", "llama-3.1-8b")]
)
def test_unknown_shape_is_refused_with_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as raised:
        shape_folder(name)
    assert str(raised.value) == f"model_shape={name!r}: known are {', '.join(NUM_PARAMETERS)}; did you mean {near!r}?"


@pytest.mark.parametrize("name", ["../models", "", "qwen3-8b/config.json"])
def test_shape_is_a_name_not_a_path(name: str) -> None:
    with pytest.raises(ConfigError, match="known are"):
        shape_folder(name)


@pytest.mark.parametrize("benchmark", ["throughput", "latency", "startup", "profile"])
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--model-shape", "qwen-0.6b"], "did you mean 'qwen3-0.6b'?"),
        (["--model-shape", "qwen3-8b", "--model", "x"], "model_shape='qwen3-8b' and model='x': give one of them"),
        (["--model-shape", "qwen3-8b", "--load-format", "gguf"], "load_format='gguf': a shape has no weights to load"),
    ],
    ids=["unknown", "two models", "weights"],
)
def test_refusals(benchmark: str, options: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", benchmark, *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert told in err


def test_comparison_takes_no_shape(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "compare-transformers", "--model-shape", "qwen3-8b"]) == 2
    assert "unknown option --model-shape" in capsys.readouterr().err
