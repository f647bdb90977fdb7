"""Models with a state per sequence: 8-bit weights, rejected proposed tokens, the delta rule, other parts of files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from nanovllm.bench.shapes import SHAPES
from nanovllm.config import Config
from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.row_state_options import with_row_states
from nanovllm.errors import CheckpointError
from nanovllm.layers import delta_rule
from nanovllm.models.parameters import num_parameters
from nanovllm.models.registry import describe, parse_config
from tests.helpers import (
    assert_greedy,
    copy_of,
    generate_by_reference,
    greedy_params,
    open_llm,
    prompt_of,
    scheduler_of,
)
from tests.models.test_config import raw_config
from tests.test_proposer import TwoTokens
from tests.weights.packed_files import check_greedy, write_packed

NOT_PACKED = ("lm_head", "in_proj_a", "in_proj_b", "in_proj_ba", "shared_expert_gate")


@pytest.mark.parametrize("family", ["lfm2", "lfm2-moe", "qwen3-next", "qwen3.5"])
def test_int8(tmp_path: Path, family: str) -> None:
    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if module.endswith(NOT_PACKED):
            return None
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return {"weight": weight}, (weight / scale).round() * scale

    check_greedy(write_packed(family, tmp_path, pack, {}), quantization="int8")


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5-moe"])
def test_verified_rows_among_decodes_and_chunks(family: str) -> None:
    """One prompt is proposed for, the others only decode; a small budget adds chunks to the same steps."""
    prompts = [prompt_of(length) for length in (33, 5, 20, 47)]
    known = [prompt + generate_by_reference(family, prompt, 12) for prompt in prompts[:2]]
    proposer = TwoTokens(known)
    with open_llm(family, proposer=proposer, max_num_batched_tokens=12, overlap=True) as llm:
        outputs = llm.generate(prompts, greedy_params(12), use_tqdm=False)
        check_scheduler(scheduler_of(llm))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(family, prompt, output["token_ids"])
    assert proposer.num_asked > 10


def test_lfm2_kinds_of_layers() -> None:
    raw = raw_config("lfm2")
    with pytest.raises(CheckpointError, match="layer_types=.* must say full_attention or conv for each layer"):
        parse_config(raw | {"layer_types": ["conv", "mamba", "conv"]})
    older = {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": raw.pop("intermediate_size")}
    assert parse_config(raw | older) == parse_config(raw_config("lfm2"))


def test_lfm2_without_a_bias_of_the_choice_is_refused() -> None:
    with pytest.raises(CheckpointError, match="use_expert_bias=False is not implemented"):
        parse_config(raw_config("lfm2-moe") | {"use_expert_bias": False})


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 150])
def test_delta_rule(num_tokens: int) -> None:
    """Chunks, single steps and the reference agree, from a state on."""
    torch.manual_seed(num_tokens)
    q, k = (F.normalize(torch.randn(num_tokens, 3, 8), dim=-1) for _ in range(2))
    v, state = torch.randn(num_tokens, 3, 5), torch.randn(3, 8, 5)
    decay, beta = -torch.rand(num_tokens, 3), torch.rand(num_tokens, 3)
    expected = torch_recurrent_gated_delta_rule(
        *(x[None] for x in (q * 8**0.5, k, v, decay, beta)), initial_state=state[None], output_final_state=True
    )
    for way in (delta_rule.chunks, delta_rule.steps):
        for got, wanted in zip(way(q, k, v, decay, beta, state), expected, strict=True):
            torch.testing.assert_close(got, wanted[0], atol=2e-5, rtol=1e-4)


def test_vision_tower_and_mtp_layers_are_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = copy_of("qwen3.5", tmp_path)
    (file,) = folder.glob("*.safetensors")
    tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in load_file(file).items()}
    more = {"model.visual.blocks.0.norm1.weight": torch.ones(4), "mtp.layers.0.mlp.up_proj.weight": torch.ones(4, 4)}
    save_file(tensors | more, file, metadata={"format": "pt"})
    raw = raw_config("qwen3.5")
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": raw}
    (folder / "config.json").write_text(json.dumps(whole))
    with open_llm(folder) as llm:
        (output,) = llm.generate([prompt_of(20)], greedy_params(8), use_tqdm=False)
    assert_greedy("qwen3.5", prompt_of(20), output["token_ids"])
    assert "visual (1 tensors), mtp (1 tensors)" in caplog.text


def test_qwen3_5_values_are_checked() -> None:
    raw = raw_config("qwen3.5")
    with pytest.raises(CheckpointError, match="layer_types=.* must say linear_attention or full_attention"):
        parse_config(raw | {"layer_types": ["linear_attention", "mamba", "full_attention"]})
    with pytest.raises(CheckpointError, match="linear_num_value_heads=3 is no multiple of 2 key heads"):
        parse_config(raw | {"linear_num_value_heads": 3})
    kinds = [layer.mixer_name for layer in parse_config(raw | {"layer_types": None, "num_hidden_layers": 8}).layers]
    assert kinds == 2 * [*["linear_attn"] * 3, "self_attn"]


def test_fewer_sequences_where_their_states_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default alone is lowered: three states of 50.25 MiB each, in a quarter of a quarter of the free memory."""
    monkeypatch.setattr("nanovllm.runner.memory_budget.available_memory", lambda: 64 * 2**30)
    model = describe(SHAPES / "qwen3.5-9b").config
    config = Config(model="", device="cpu")
    assert with_row_states(config, model, {}).max_num_seqs == 4 * 1024 // (3 * 50.25)
    assert with_row_states(config, model, {"max_num_seqs": 1024}) is config


def test_fewer_sequences_where_weights_leave_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU of 40 GB, states take half of what 90 % of it have left beside Qwen3.5-9B's 16-bit weights."""
    memory = 40 * 10**9
    monkeypatch.setattr("nanovllm.runner.device.resolve_device", lambda name: torch.device(name))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    model = describe(SHAPES / "qwen3.5-9b").config
    config = Config(model="", device="cuda", gpu_memory_utilization=0.9)
    left = 0.9 * memory - 2 * num_parameters(model)
    num_seqs = with_row_states(config, model, {}).max_num_seqs
    assert 0.49 * left < num_seqs * 3 * 50.25 * 2**20 <= 0.5 * left
    assert num_seqs < memory / 4 / (3 * 50.25 * 2**20)
