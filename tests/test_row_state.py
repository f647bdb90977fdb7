"""State per row: a mixer that adds up all tokens so far, in a model made here, without touching the engine."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.engine.consistency import check_scheduler
from nanovllm.layers.context import BuildContext
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import Linear
from nanovllm.layers.residual import Residual
from nanovllm.layers.spec import Dim, LayerSpec, MlpSpec, Weight, linear_weights
from nanovllm.layers.step import Step
from nanovllm.models import registry
from nanovllm.models.spec import ModelSpec, llama_shaped
from nanovllm.row_state import RowState
from tests.helpers import greedy_params, prompt_of, scheduler_of
from tests.test_proposer import TwoTokens, texts_of

HIDDEN, NUM_LAYERS, VOCAB_SIZE = 32, 4, 160
CONFIG = {
    "architectures": ["RunningSumForCausalLM"],
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 2,
    "max_position_embeddings": 512,
}


@dataclass(frozen=True)
class RunningSumSpec:
    hidden_size: int

    def weights(self) -> dict[str, Weight]:
        return linear_weights(("o_proj",), (Dim(self.hidden_size),), Dim(self.hidden_size))

    def state(self, dtype: str, num_ranks: int = 1) -> RowState:
        return RowState((self.hidden_size,))

    def build(self, context: BuildContext) -> "RunningSum":
        return RunningSum(self, context)


class RunningSum:
    """o_proj(sum of norm(x) over all tokens so far / 8)"""

    def __init__(self, spec: RunningSumSpec, context: BuildContext) -> None:
        self.o_proj = Linear(spec.weights(), context)
        self.slots, self.finish_loading = self.o_proj.slots, self.o_proj.finish_loading

    def mix(self, x: Residual, state: Tensor, step: Step, *, norm: RMSNorm) -> Tensor:
        seqs = step.sequences
        assert seqs is not None
        out = torch.empty_like(x.rows)
        for row, start, first, num_new in zip(
            *(column.tolist() for column in (seqs.rows, seqs.starts, seqs.first_tokens, seqs.num_new)), strict=True
        ):
            before = state[row] if start > 0 else torch.zeros_like(state[row])
            sums = before + x.normed(norm)[first : first + num_new].cumsum(dim=0)
            state[row] = sums[-1]
            out[first : first + num_new] = sums / 8
        return out


def family(mixed: bool) -> Any:
    def spec(raw: dict[str, Any]) -> ModelSpec:
        """Every layer, or every second one, with a running sum in place of attention."""
        base = llama_shaped(raw)
        sums = LayerSpec(
            hidden_size=HIDDEN,
            mixer=RunningSumSpec(HIDDEN),
            feed_forward=MlpSpec(hidden_size=HIDDEN, intermediate_size=48),
            norm_eps=1e-6,
        )
        layers = [layer if mixed and index % 2 else sums for index, layer in enumerate(base.layers)]
        return replace(base, layers=tuple(layers))

    return spec


@pytest.fixture(params=[False, True], ids=["rows", "rows and attention"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(registry.FAMILIES, "RunningSumForCausalLM", family(request.param))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def open_model(model: Path, **options: Any) -> LLM:
    small = {"device": "cpu", "dtype": "float32", "load_format": "dummy", "skip_tokenizer_init": True}
    small |= {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_block_size": 16, "num_kv_cache_blocks": 64}
    return LLM(model, **(small | options))


PROMPTS = [prompt_of(length, vocab_size=VOCAB_SIZE) for length in (40, 3, 17, 90, 25, 40)]
WAYS = {
    "together": {},
    "chunked": {"max_num_batched_tokens": 7},
    "overlapped": {"overlap": True, "max_num_batched_tokens": 16},
    "preempted": {"num_kv_cache_blocks": 9, "max_num_batched_tokens": 16},
    "preempted, overlapped": {"num_kv_cache_blocks": 9, "overlap": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_tokens_do_not_depend_on_the_batch(model: Path, way: str) -> None:
    """Alone and whole, a sequence's state starts at zero; in all other ways rows are used again and filled in parts."""
    expected = []
    for prompt in PROMPTS:
        with open_model(model) as llm:
            expected += [output["token_ids"] for output in llm.generate([prompt], greedy_params(20), use_tqdm=False)]
    with open_model(model, **WAYS[way]) as llm:
        for round_ in range(2):
            outputs = llm.generate(PROMPTS, greedy_params(20), use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == expected
            assert any(output.num_cached_tokens > 0 for output in outputs) or not round_
        has_blocks = bool(scheduler_of(llm).config.groups)
        assert (scheduler_of(llm).num_preemptions > 0) == ("preempted" in way and has_blocks)


@pytest.mark.parametrize("overlap", [False, True])
def test_rejected_tokens_leave_no_trace_in_the_state(model: Path, overlap: bool) -> None:
    """Also with a budget of as many tokens as sequences, where rows that start again wait for others."""
    for max_num_batched_tokens in (64, 4):
        options = {"overlap": overlap, "max_num_batched_tokens": max_num_batched_tokens}
        with open_model(model, **options) as llm:
            expected = llm.generate(PROMPTS, greedy_params(20), use_tqdm=False)
        proposer = TwoTokens(texts_of(expected))
        with open_model(model, proposer=proposer, **options) as llm:
            outputs = llm.generate(PROMPTS, greedy_params(20), use_tqdm=False)
            assert [output["token_ids"] for output in outputs] == [output["token_ids"] for output in expected]
            assert proposer.num_asked > 10
            check_scheduler(scheduler_of(llm))


def test_the_plan_counts_rows_and_checkpoints(model: Path) -> None:
    options = {"device": "cpu", "dtype": "float32", "max_num_seqs": 7, "kv_cache_memory_bytes": 1 << 20}
    plan = LLM.plan(model, **options)
    num_sums = NUM_LAYERS // 2 if plan.groups else NUM_LAYERS
    assert plan.row_state_bytes == (8 + 14) * num_sums * HIDDEN * 4
    assert plan.row_state_bytes <= plan.kv_cache_bytes <= 1 << 20
