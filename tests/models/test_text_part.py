"""The text model of a checkpoint that has a vision tower as well."""

import logging
from pathlib import Path

import pytest
import transformers
from safetensors.torch import load_file, save_file

from nanovllm.checkpoint.packed.config import read_packing
from nanovllm.errors import CheckpointError
from nanovllm.models.registry import parse_config
from tests.helpers import assert_greedy, edit_config, greedy_params, open_llm, prompt_of, reference

VISION = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 16,
}


def write(folder: Path) -> Path:
    """A checkpoint with the weights of the family ministral3."""
    text = reference("ministral3")
    config = transformers.Mistral3Config(
        text_config=text.config.to_dict(), vision_config=VISION, tie_word_embeddings=False
    )
    model = transformers.Mistral3ForConditionalGeneration(config).eval()
    model.model.language_model.load_state_dict(text.model.state_dict())
    model.lm_head.load_state_dict(text.lm_head.state_dict())
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("spelling", ["language_model.model.", "model.language_model."])
def test_the_vision_tower_is_skipped_with_a_notice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spelling: str
) -> None:
    folder = write(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    if spelling == "model.language_model.":
        renamed = {name.replace("language_model.model.", spelling): one for name, one in tensors.items()}
        renamed = {name.replace("language_model.lm_head.", "lm_head."): one for name, one in renamed.items()}
        tensors = {name if "vision" not in name else f"model.{name}": one for name, one in renamed.items()}
        save_file(tensors, folder / "model.safetensors")
    assert any(name.startswith(spelling) for name in tensors)
    with caplog.at_level(logging.WARNING, logger="nanovllm"), open_llm(folder) as llm:
        (output,) = llm.generate([prompt_of(37)], greedy_params(8), use_tqdm=False)
    assert_greedy("ministral3", prompt_of(37), output["token_ids"])
    assert "only text is implemented; not loaded: " in caplog.text and "vision_tower (" in caplog.text


def test_another_text_model_is_refused(tmp_path: Path) -> None:
    raw = {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "qwen2"}}
    with pytest.raises(CheckpointError, match="text_config: model_type='qwen2'; known here: mistral, ministral3"):
        parse_config(raw)


def test_a_missing_original_length_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path)
    edit_config(folder, lambda raw: raw["text_config"]["rope_parameters"].pop("original_max_position_embeddings"))
    with pytest.raises(CheckpointError, match="'original_max_position_embeddings' is missing"):
        open_llm(folder)


def test_names_in_a_quantization_config() -> None:
    raw = {"quant_method": "fp8", "modules_to_not_convert": ["language_model.model.layers.0.mlp", "model.vision_tower"]}
    packing = read_packing(raw | {"activation_scheme": "static", "dequantize": False})
    assert packing.form_of("model.layers.0.mlp.up_proj") is None
    assert packing.form_of("model.layers.1.mlp.up_proj") is not None
    with pytest.raises(CheckpointError, match="dequantize=True cannot be read"):
        read_packing(raw | {"dequantize": True})
