"""Layers with different rotary embeddings, scales and windows, against transformers changed in the same way."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from nanovllm.layers.spec import AttentionSpec, RopeSpec
from nanovllm.models import registry
from nanovllm.models.spec import ModelSpec, llama_shaped
from tests.helpers import greedy_params, model_dir, open_llm, prompt_of

OTHER_ROPE = RopeSpec(theta=37.0)
SCALES = (0.9, None, 0.1)  # of the layers; None = the usual one
PROMPTS = [prompt_of(30), prompt_of(7)]


def spec(raw: dict[str, Any]) -> ModelSpec:
    """Llama, with another rotary embedding in the second layer and a scale in the first and third."""
    model = llama_shaped(raw)
    layers = []
    for index, layer in enumerate(model.layers):
        assert isinstance(layer.mixer, AttentionSpec)
        mixer = replace(layer.mixer, scale=SCALES[index])
        layers.append(replace(layer, mixer=replace(mixer, rope=OTHER_ROPE) if index == 1 else mixer))
    return replace(model, layers=tuple(layers))


def reference() -> torch.nn.Module:
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir("llama"), attn_implementation="eager")
    config = transformers.AutoConfig.from_pretrained(model_dir("llama"))
    config.rope_parameters = {"rope_type": "default", "rope_theta": OTHER_ROPE.theta}
    other = LlamaRotaryEmbedding(config)
    for layer, scale in zip(model.model.layers, SCALES, strict=True):
        if scale is not None:
            layer.self_attn.scaling = scale

    def rotated_otherwise(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        hidden, positions = kwargs["hidden_states"], kwargs["position_ids"]
        return args, kwargs | {"position_embeddings": other(hidden, positions)}

    model.model.layers[1].self_attn.register_forward_pre_hook(rotated_otherwise, with_kwargs=True)
    return model.eval()


@pytest.mark.parametrize("chunk", [8, 512])
def test_equals_transformers(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.FAMILIES, "LlamaForCausalLM", spec)
    theirs = reference()
    with open_llm("llama", max_num_batched_tokens=chunk) as llm:
        answers = [out["token_ids"] for out in llm.generate(PROMPTS, greedy_params(12), use_tqdm=False)]
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, use_cache=False, eos_token_id=None
        )
        assert answer == expected[0, len(prompt) :].tolist()
