"""A plan becomes the right flat tensors, and logits of padding rows have no effect."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.mlp import MLP
from nanovllm.layers.residual import Residual
from nanovllm.plan import NewRow, RowStep, StepPlan
from nanovllm.runner.forward_batch import build_batch
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.upload import Upload
from tests.helpers import TEXT_MODEL, assert_greedy, greedy_params, open_llm, prompt_of

CPU = torch.device("cpu")
BACKEND: Any = SimpleNamespace(block_size=16, prepare=lambda geometry, upload: None)


def filled_row(row: int, num_tokens: int) -> NewRow:
    return NewRow(
        row=row,
        token_ids=tuple(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        block_tables=((row,),),
        params=SamplingParams(),
        seed=0,
        stop_token_ids=(),
        bad_words=(),
    )


def test_the_rows_that_get_logits_are_padded() -> None:
    upload = Upload(capacity=64, device=CPU)
    table = RequestTable(max_num_seqs=4, max_model_len=16, block_size=16, upload=upload)
    plan = StepPlan(
        decode_rows=(2,),
        row_steps=(RowStep(1, 3, 4, num_sampled=1), RowStep(4, 0, 5, num_sampled=0), RowStep(3, 0, 2, num_sampled=1)),
        new_rows=tuple(filled_row(row, num_tokens) for row, num_tokens in ((1, 7), (2, 9), (3, 2), (4, 8))),
    )
    table.apply(plan)
    batch = table.send(lambda upload: build_batch(plan, table, BACKEND.prepare, upload, head_size=6))
    assert batch.rows.tolist() == [2] + [1] * 4 + [4] * 5 + [3] * 2
    assert batch.positions.tolist() == [8, 3, 4, 5, 6, 0, 1, 2, 3, 4, 0, 1]
    assert batch.sampled_rows is not None and batch.sampled_rows.tolist() == [2, 1, 3]
    assert batch.logits_rows is not None and batch.logits_rows.tolist() == [0, 4, 11, 0, 4, 11]


def test_padding_rows_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "_head_size", lambda runner, num_sampled: num_sampled + 3)
    prompts = [prompt_of(length) for length in (3, 20, 9)]
    with open_llm(TEXT_MODEL, max_num_batched_tokens=16, max_num_seqs=4, cpu_kernels="torch") as llm:
        outputs = llm.generate(prompts, greedy_params(6), use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(TEXT_MODEL, prompt, output["token_ids"])


@pytest.mark.parametrize("scores_prompts", [False, True])
def test_the_last_layer_does_no_more_than_is_wanted(monkeypatch: pytest.MonkeyPatch, scores_prompts: bool) -> None:
    """Rows in each layer's MLP for three prompts in chunks of 16 tokens; no prompt ends in the second chunk."""
    seen: dict[int, list[int]] = {}
    call = MLP.__call__

    def counted(mlp: MLP, x: Residual, *, norm: RMSNorm) -> Residual:
        seen.setdefault(id(mlp), []).append(len(x))
        return call(mlp, x, norm=norm)

    monkeypatch.setattr(MLP, "__call__", counted)
    prompts = [prompt_of(length) for length in (3, 37, 5)]
    params = greedy_params(1, prompt_logprobs=1 if scores_prompts else None)
    with open_llm(TEXT_MODEL, max_num_batched_tokens=16, max_num_seqs=4, cpu_kernels="torch") as llm:
        seen.clear()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        layers = [seen[id(layer.feed_forward)] for layer in llm.llm_engine._core.executor.model.layers]
    assert layers[0] == [16, 16, 13]
    assert layers[-1] == (layers[0] if scores_prompts else [1, 2])
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(TEXT_MODEL, prompt, output["token_ids"])
