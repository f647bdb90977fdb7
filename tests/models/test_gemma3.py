"""Gemma 3: a checkpoint with a vision tower, and values that its config leaves out."""

import logging
from pathlib import Path

import pytest
import torch
import transformers

from nanovllm.models.registry import parse_config
from nanovllm.models.scales import Scales
from tests.helpers import greedy_params, open_llm, prompt_of

TEXT = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "image_size": 8,
    "patch_size": 4,
}
PROMPT = prompt_of(30)


@pytest.mark.parametrize("older_names", [False, True])
def test_gemma3_with_a_vision_tower(older_names: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    torch.manual_seed(0)
    theirs = transformers.Gemma3ForConditionalGeneration(config).eval()
    theirs.save_pretrained(tmp_path, save_original_format=older_names)
    with caplog.at_level(logging.WARNING), open_llm(tmp_path) as llm:
        (output,) = llm.generate([PROMPT], greedy_params(10), use_tqdm=False)
    asked = torch.tensor([PROMPT])
    expected = theirs.generate(asked, max_new_tokens=10, do_sample=False, eos_token_id=None)
    assert output["token_ids"] == expected[0, len(PROMPT) :].tolist()
    assert "not loaded: " in caplog.text and "vision_tower (" in caplog.text


def test_values_that_files_leave_out() -> None:
    """The config of gemma-3-4b-it states these alone."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    ours = parse_config(raw | {"eos_token_id": [1, 106]})
    theirs = transformers.Gemma3Config(text_config=text).text_config
    first, sixth = ours.layers[0].mixer, ours.layers[5].mixer
    assert (first.num_heads, first.num_kv_heads) == (theirs.num_attention_heads, theirs.num_key_value_heads)
    assert (first.head_dim, first.scale) == (theirs.head_dim, theirs.query_pre_attn_scalar**-0.5)
    assert (first.rope.theta, sixth.rope.theta, sixth.rope.scaling.factor) == (10_000.0, 1_000_000.0, 8.0)
    kinds = {1024: "sliding_attention", None: "full_attention"}
    assert [kinds[layer.mixer.window] for layer in ours.layers] == theirs.layer_types
    assert (ours.vocab_size, ours.max_position) == (theirs.vocab_size, theirs.max_position_embeddings)
    assert (ours.tie_word_embeddings, ours.dtype, ours.eos_token_ids) == (True, "bfloat16", (1, 106))


def test_the_scale_of_embeddings_is_rounded_as_in_transformers() -> None:
    """sqrt(3840) = 61.97 is 62 in bfloat16."""
    scales = Scales(embedding=3840**0.5, rounds_embedding=True)
    x = torch.tensor([[1.0, 0.5, -3.0]])
    assert torch.equal(scales.embedded(x.bfloat16()), (62 * x).bfloat16())
    assert torch.equal(scales.embedded(x), x * torch.tensor(3840**0.5))


def test_logits_are_bounded() -> None:
    logits = torch.tensor([[-100.0, 0.1, 100.0]])
    bounded = Scales(logits_cap=30.0).scaled_logits(logits)
    torch.testing.assert_close(bounded, 30 * torch.tanh(logits / 30))
