"""What somebody adds without touching the engine: a family with a mixer of its own, a weight format, a proposer."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from nanovllm import LLM, SamplingParams, config
from nanovllm.checkpoint.stored import Part, Stored
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import Dim, Weight, linear_weights
from nanovllm.layers.step import Step
from nanovllm.models import registry
from nanovllm.models.spec import ModelSpec, llama_shaped
from nanovllm.row_state import RowState
from nanovllm.weights import quantized
from tests.helpers import assert_greedy, greedy_params, model_dir, prompt_of

HIDDEN, SIZE, LAYERS, VOCAB = 32, 48, 2, 160
CONFIG = {"architectures": ["RunningMean"], "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": SIZE}
CONFIG |= {"num_hidden_layers": LAYERS, "num_attention_heads": 2, "max_position_embeddings": 256}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "num_kv_cache_blocks": 64}
OPTIONS |= {"skip_tokenizer_init": True, "max_num_batched_tokens": 16, "max_num_seqs": 4}
PROMPTS = [prompt_of(length, vocab_size=VOCAB) for length in (40, 3, 17, 25, 9)]


@dataclass(frozen=True)
class RunningMeanSpec:
    def weights(self) -> dict[str, Weight]:
        return linear_weights(("o_proj",), (Dim(HIDDEN),), Dim(HIDDEN))

    def state(self, dtype: str, num_ranks: int = 1) -> RowState:
        return RowState((HIDDEN,))

    def build(self, context: BuildContext) -> "RunningMean":
        return RunningMean(Linear(self.weights(), context))


class RunningMean:
    def __init__(self, o_proj: Linear) -> None:
        self.o_proj, self.slots, self.finish_loading = o_proj, o_proj.slots, o_proj.finish_loading

    def mix(self, x: Residual, state: Tensor, step: Step, *, norm: RMSNorm) -> Tensor:
        assert step.sequences is not None
        s, normed, out = step.sequences, x.normed(norm), torch.empty_like(x.rows)
        for row, start, first, num_new in torch.stack([s.rows, s.starts, s.first_tokens, s.num_new]).T.tolist():
            tokens = slice(first, first + num_new)
            sums = (state[row] if start else 0) + normed[tokens].cumsum(dim=0)
            state[row] = sums[-1]
            out[tokens] = sums / torch.arange(start + 1, start + num_new + 1)[:, None]
        return out


def running_mean(raw: dict[str, Any]) -> ModelSpec:
    base = llama_shaped(raw)
    return replace(base, layers=tuple(replace(layer, mixer=RunningMeanSpec()) for layer in base.layers))


class HalfWeight:
    format_name = "half"

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.tensor = shape, torch.zeros(shape, dtype=torch.float16)

    def load(self, index: tuple[int | slice, ...], tensor: Stored, part: Part) -> None:
        self.tensor[index] = tensor.read(part).half()

    def finish_loading(self) -> None: ...

    def matmul(self, x: Tensor, bias: Tensor | None = None, expert: int | None = None) -> Tensor:
        return F.linear(x, (self.tensor if expert is None else self.tensor[expert]).to(x.dtype), bias)


class HalfFormat:
    name = "half"

    def num_bytes(self, shape: tuple[int, ...], itemsize: int) -> int:
        return 2 * torch.Size(shape).numel()

    def empty(self, shape: tuple[int, ...], **_: Any) -> HalfWeight:
        return HalfWeight(shape)


class TheSameAgain:
    def propose(self, token_ids: list[int], max_tokens: int) -> list[int]:
        return token_ids[-2:][:max_tokens]


def random_weights() -> dict[str, Tensor]:
    shapes = {"self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (SIZE, HIDDEN)}
    shapes |= {"mlp.up_proj": (SIZE, HIDDEN), "mlp.down_proj": (HIDDEN, SIZE)}
    shapes |= {"input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,)}
    names = {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in shapes.items()}
    names |= {"model.embed_tokens.weight": (VOCAB, HIDDEN), "lm_head.weight": (VOCAB, HIDDEN)}
    generator = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=generator) / 3 for n, s in (names | {"model.norm.weight": (HIDDEN,)}).items()}


def plain_greedy(weights: dict[str, Tensor], prompt: list[int], num_tokens: int) -> list[int]:
    token_ids = list(prompt)
    for _ in range(num_tokens):
        x = weights["model.embed_tokens.weight"][token_ids]
        for i in range(LAYERS):
            w = {name.split(".", 3)[3]: w for name, w in weights.items() if name.startswith(f"model.layers.{i}.")}
            normed = F.rms_norm(x, (HIDDEN,), w["input_layernorm.weight"], 1e-6)
            x = x + (normed.cumsum(0) / torch.arange(1, len(x) + 1)[:, None]) @ w["self_attn.o_proj.weight"].T
            normed = F.rms_norm(x, (HIDDEN,), w["post_attention_layernorm.weight"], 1e-6)
            gate, up = normed @ w["mlp.gate_proj.weight"].T, normed @ w["mlp.up_proj.weight"].T
            x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
        x = F.rms_norm(x[-1], (HIDDEN,), weights["model.norm.weight"], 1e-6)
        token_ids.append(int((weights["lm_head.weight"] @ x).argmax()))
    return token_ids[len(prompt) :]


@pytest.mark.parametrize("quantization", [None, "half"])
def test_a_family_with_its_own_mixer_and_a_weight_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quantization: str | None
) -> None:
    monkeypatch.setitem(registry.FAMILIES, "RunningMean", running_mean)
    monkeypatch.setitem(quantized.FORMATS, "half", HalfFormat)
    monkeypatch.setattr(config, "QUANTIZATIONS", (*config.QUANTIZATIONS, "half"))
    weights = random_weights()
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights, tmp_path / "model.safetensors")
    with LLM(tmp_path, quantization=quantization, **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, greedy_params(12), use_tqdm=False)
    if quantization:
        weights |= {n: w.half().float() for n, w in weights.items() if "layers" in n and w.dim() == 2}
    assert [output["token_ids"] for output in outputs] == [plain_greedy(weights, p, 12) for p in PROMPTS]


def test_a_proposer_of_two_tokens() -> None:
    sampled = SamplingParams(temperature=0.8, seed=5, max_tokens=12, ignore_eos=True)
    with (
        LLM(model_dir("llama"), proposer=TheSameAgain(), **OPTIONS) as llm,
        LLM(model_dir("llama"), **OPTIONS) as plain,
    ):
        for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, greedy_params(12), use_tqdm=False), strict=True):
            assert_greedy("llama", prompt, output["token_ids"])
        drawn = [[o["token_ids"] for o in e.generate(PROMPTS, sampled, use_tqdm=False)] for e in (llm, plain)]
    assert drawn[0] == drawn[1]
