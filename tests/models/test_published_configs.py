"""Configs spelled as published ones: what they mean, how many parameters that is, and tiny models of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from nanovllm.models.parameters import num_parameters
from nanovllm.models.registry import parse_config
from tests.helpers import CLEAR_MARGIN, greedy_params, open_llm, prompt_of, randomize, set_limit
from tests.models.published import PUBLISHED
from tests.models.published_sizes import NUM_PARAMETERS, SMALL, TINY

PROMPTS = [prompt_of(100), prompt_of(7)]  # the first is longer than every window and original length
NUM_TOKENS = 12


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_config_means_what_transformers_reads(name: str) -> None:
    """What it leaves out, and older spellings, are read as there."""
    raw = PUBLISHED[name]
    ours = parse_config(dict(raw))
    completed = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw)))
    theirs: dict[str, Any] = json.loads(json.dumps(completed.to_dict()))
    # which ids end a sequence is in generation_config.json; a dtype is what the published file says
    theirs |= {"architectures": raw["architectures"], "dtype": ours.dtype, "eos_token_id": None}
    assert parse_config(theirs) == ours
    assert ours.dtype == "bfloat16"
    assert num_parameters(ours) == NUM_PARAMETERS.get(name, num_parameters(ours))


def tiny(name: str, folder: Path) -> transformers.PreTrainedModel:
    """Write a tiny random model with the config as published; returns it."""
    raw = PUBLISHED[name] | TINY | SMALL[name]
    raw |= {"torch_dtype": "float32"} if "torch_dtype" in raw else {"dtype": "float32"}
    if "block_ff_dim" in raw:
        del raw["intermediate_size"]
    config = transformers.CONFIG_MAPPING[raw["model_type"]].from_dict(json.loads(json.dumps(raw)))
    config._attn_implementation = "eager"
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    set_limit(model)
    minus_one = raw["model_type"].startswith(("gemma3", "qwen3_next", "qwen3_5"))  # norms are stored as w - 1
    randomize(model, seed=1, norm_offset=1.0 if minus_one else 0.0)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("name", SMALL)
def test_tiny_models(name: str, tmp_path: Path) -> None:
    model = tiny(name, tmp_path)
    with open_llm(tmp_path, max_model_len=128, max_num_batched_tokens=32) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(NUM_TOKENS, logprobs=0), use_tqdm=False)
    # with the long factors of longrope an engine computes short sequences, too; transformers only long ones
    compared = outputs[:1] if "longrope" in str(SMALL[name]) else outputs
    for output in compared:
        tokens = output["token_ids"]
        with torch.inference_mode():
            logits = model(torch.tensor([[*output.prompt_token_ids, *tokens[:-1]]]), use_cache=False).logits[0]
        expected = logits[len(output.prompt_token_ids) - 1 :].log_softmax(dim=-1)
        (best, second), ids = (part.T for part in expected.topk(2))
        assert tokens == ids[0].tolist()
        assert (best - second).min() > CLEAR_MARGIN, "the oracle is of two minds; change the seed"
        for position, entries in enumerate(output.outputs[0].logprobs or []):
            assert abs(entries[tokens[position]].logprob - best[position].item()) < 1e-4


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "SmolLM3-3B": lambda raw: raw.update(no_rope_layers=[1, 1, 1, 1]),
    "Qwen3-8B with YaRN": lambda raw: raw["rope_scaling"].update(factor=8.0),
    "gpt-oss-20b": lambda raw: raw.update(sliding_window=30),
    "Qwen3.6-27B": lambda raw: raw["rope_parameters"].update(partial_rotary_factor=0.5),
}


@pytest.mark.parametrize("name", CHANGES)
def test_tiny_models_reach_what_is_particular(name: str, tmp_path: Path) -> None:
    """The same weights with another value of the config give other logprobs: the tests above would notice."""
    tiny(name, tmp_path)

    def logprobs() -> list[float]:
        with open_llm(tmp_path, max_model_len=128) as llm:
            (output,) = llm.generate(PROMPTS[:1], greedy_params(1, prompt_logprobs=0), use_tqdm=False)
        entries = zip(output.prompt_logprobs or [], PROMPTS[0], strict=True)
        return [scores[token].logprob for scores, token in entries if scores is not None]

    before = logprobs()
    raw = json.loads((tmp_path / "config.json").read_text())
    CHANGES[name](raw)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert max(abs(one - other) for one, other in zip(before, logprobs(), strict=True)) > 1e-2
