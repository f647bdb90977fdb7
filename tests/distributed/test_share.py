"""How a model is divided among ranks, and which divisions are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

import nanovllm
from nanovllm.distributed.group import Place
from nanovllm.distributed.share import Share, share_of
from nanovllm.errors import ConfigError
from nanovllm.models.registry import describe
from nanovllm.models.spec import ModelConfig

SHAPES = Path(nanovllm.__file__).parent / "shapes"
QWEN3 = describe(SHAPES / "qwen3-32b").config
MOE = describe(SHAPES / "qwen3-30b-a3b").config


def shares(model: ModelConfig, tensor: int, pipeline: int = 1) -> list[Share]:
    return [share_of(model, Place(rank, tensor, pipeline, 0)) for rank in range(tensor * pipeline)]


@pytest.mark.parametrize("model", [QWEN3, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (8, 1), (1, 5), (2, 3)])
def test_spans_cover_everything_once(model: ModelConfig, tensor: int, pipeline: int) -> None:
    ranks = shares(model, tensor, pipeline)
    for stage in range(pipeline):
        of_stage = ranks[stage * tensor : (stage + 1) * tensor]
        for name in ("queries", "mlp", "vocab"):
            spans = [getattr(share, name) for share in of_stage]
            covered = [index for span in spans for index in range(span.whole)[span.part]]
            assert covered == list(range(spans[0].whole)), name
    assert [layer for share in ranks[::tensor] for layer in share.layers] == list(range(model.num_layers))
    assert [share.has_embedding for share in ranks] == [True] * tensor + [False] * (len(ranks) - tensor)
    assert [share.has_head for share in ranks] == [False] * (len(ranks) - tensor) + [True] * tensor


def test_one_rank_has_the_model_itself() -> None:
    (alone,) = shares(MOE, 1)
    assert alone.model == MOE and alone.num_parameters() == MOE.num_parameters()


def test_queries_lie_with_their_keys() -> None:
    model = replace(QWEN3, num_heads=16, num_kv_heads=4, head_dim=1)
    for tensor in (1, 2, 4, 8, 16):
        for share in shares(model, tensor):
            for head in range(16)[share.queries.part]:
                assert head // 4 in range(4)[share.keys.part], (tensor, head)
            assert share.model.num_kv_heads == max(1, 4 // tensor)


def test_the_last_stage_has_the_fewest_layers() -> None:
    model = replace(QWEN3, num_layers=14, windows=tuple(range(14)))
    ranks = shares(model, 1, 4)
    assert [len(share.layers) for share in ranks] == [3, 4, 4, 3]
    assert ranks[1].model.windows == (3, 4, 5, 6)


def test_dense_layers_are_counted_from_the_stage_on() -> None:
    assert MOE.moe is not None
    model = replace(MOE, moe=replace(MOE.moe, dense_layers=frozenset({0, 30})))
    first, second = shares(model, 1, 2)
    assert first.model.moe.dense_layers == {0} and second.model.moe.dense_layers == {6}


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    ranks = shares(replace(QWEN3, vocab_size=13), 8)
    assert {share.vocab_rows for share in ranks} == {2}
    assert [share.vocab.size for share in ranks] == [2, 2, 2, 2, 2, 2, 1, 0]


@pytest.mark.parametrize(
    "changes, tensor, pipeline, message",
    [
        ({"num_heads": 6}, 4, 1, "tensor_parallel_size=4: the model's 6 attention heads"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, 1, "tensor_parallel_size=2: the model's 3 KV heads"),
        ({"intermediate_size": 30}, 4, 1, "tensor_parallel_size=4: the model's 30 columns of the MLP"),
        ({"num_layers": 2}, 1, 3, "pipeline_parallel_size=3: the model has only 2 layers"),
    ],
)
def test_refused(changes: dict[str, int], tensor: int, pipeline: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shares(replace(QWEN3, **changes), tensor, pipeline)


def test_experts_that_do_not_divide_are_refused() -> None:
    assert MOE.moe is not None
    with pytest.raises(ConfigError, match="50 columns of an expert"):
        shares(replace(MOE, moe=replace(MOE.moe, intermediate_size=50)), 4)
