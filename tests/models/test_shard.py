"""How a model is divided among ranks, and which divisions are refused."""

from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

import nanovllm
from nanovllm.checkpoint.json_file import read_json
from nanovllm.distributed.group import Rank
from nanovllm.errors import ConfigError
from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.spec import AttentionSpec, Dim, MlpSpec
from nanovllm.models.parameters import names_of, num_bytes, num_parameters, parameters
from nanovllm.models.registry import describe, parse_config
from nanovllm.models.shard import Shard, shard_of, whole_model
from nanovllm.models.spec import ModelSpec

SHAPES = Path(nanovllm.__file__).parent / "shapes"
QWEN3 = describe(SHAPES / "qwen3-32b").config
MOE = describe(SHAPES / "qwen3-30b-a3b").config


def changed(shape: str = "qwen3-32b", **changes: Any) -> ModelSpec:
    return parse_config(read_json(SHAPES / shape / "config.json") | changes)


def shards(model: ModelSpec, tensor: int, pipeline: int = 1) -> list[Shard]:
    return [shard_of(model, Rank(rank, tensor, pipeline, 0)) for rank in range(tensor * pipeline)]


def num_held(shard: Shard) -> int:
    return num_bytes(shard, lambda prefix, weight, shape: prod(shape))


@pytest.mark.parametrize("model", [QWEN3, MOE], ids=["dense", "experts"])
@pytest.mark.parametrize("tensor, pipeline", [(1, 1), (2, 1), (8, 1), (1, 5), (2, 3)])
def test_parts_cover_everything_once(model: ModelSpec, tensor: int, pipeline: int) -> None:
    ranks = shards(model, tensor, pipeline)
    weights = [weight for _, weight in parameters(whole_model(model))]
    dims = {dim for weight in weights for dim in (*weight.rows, weight.columns) if dim and dim.divided}
    assert len(dims) >= 4  # queries, keys, columns of the MLP or the experts, vocabulary
    for dim in dims:
        if not dim.repeats or dim.count >= tensor:
            covered = [i for rank in range(tensor) for i in range(dim.size)[dim.part(rank, tensor).slice]]
            assert covered == list(range(dim.size)), dim
    assert [layer for shard in ranks[::tensor] for layer in shard.layers] == list(range(model.num_layers))
    assert [shard.has_embedding for shard in ranks] == [True] * tensor + [False] * (len(ranks) - tensor)
    assert [shard.has_head for shard in ranks] == [False] * (len(ranks) - tensor) + [True] * tensor


def test_one_rank_has_the_model_itself() -> None:
    for model in (QWEN3, MOE):
        (alone,) = shards(model, 1)
        assert num_held(alone) == num_parameters(model)


def test_every_checkpoint_tensor_has_one_place() -> None:
    for model in (QWEN3, MOE):
        for _, weight in model.layers[0].weights():
            parts = list(weight.parts(0, 1))
            assert sorted(part.name for part in parts) == sorted(names_of(weight))
            assert sum(prod(part.shape) for part in parts) == weight.num_parameters


def test_queries_are_on_the_rank_of_their_keys() -> None:
    queries, keys = Dim(16, 1, "attention heads"), Dim(4, 1, "KV heads", repeats=True)
    for tensor in (1, 2, 4, 8, 16):
        for rank in range(tensor):
            for head in range(16)[queries.part(rank, tensor).slice]:
                assert head // 4 in range(4)[keys.part(rank, tensor).slice], (tensor, head)
            assert keys.part(rank, tensor).size == max(1, 4 // tensor)
        model = changed(num_attention_heads=16, num_key_value_heads=4)
        mixer = model.layers[0].mixer
        assert isinstance(mixer, AttentionSpec) and mixer.on_ranks(tensor).num_kv_heads == max(1, 4 // tensor)


def test_the_last_stage_has_the_fewest_layers() -> None:
    kinds = ["sliding_attention", "full_attention"] * 7
    windowed = {"use_sliding_window": True, "sliding_window": 8, "layer_types": kinds}
    ranks = shards(changed(num_hidden_layers=14, **windowed), 1, 4)
    assert [len(shard.layers) for shard in ranks] == [3, 4, 4, 3]
    assert [layer.mixer.window for layer in ranks[1].layer_specs] == [None, 8, None, 8]


def test_dense_layers_stay_where_they_are() -> None:
    model = changed("qwen3-30b-a3b", mlp_only_layers=[0, 30])
    first, second = shards(model, 1, 2)
    assert [i for i, layer in enumerate(first.layer_specs) if isinstance(layer.feed_forward, MlpSpec)] == [0]
    assert [i for i, layer in enumerate(second.layer_specs) if isinstance(layer.feed_forward, MlpSpec)] == [6]


def test_a_vocabulary_that_does_not_divide_is_padded() -> None:
    (vocab,) = replace(QWEN3, vocab_size=13).embedding_weight().rows
    parts = [vocab.part(rank, 8) for rank in range(8)]
    assert {part.held for part in parts} == {2}
    assert [part.size for part in parts] == [2, 2, 2, 2, 2, 2, 1, 0]


@pytest.mark.parametrize(
    "changes, tensor, pipeline, message",
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 6},
            4,
            1,
            "tensor_parallel_size=4: the model's 6 attention heads",
        ),
        (
            {"num_attention_heads": 12, "num_key_value_heads": 3},
            2,
            1,
            "tensor_parallel_size=2: the model's 3 KV heads",
        ),
        ({"intermediate_size": 30}, 4, 1, "tensor_parallel_size=4: the model's 30 columns of the MLP"),
        ({"num_hidden_layers": 2}, 1, 3, "pipeline_parallel_size=3: the model has only 2 layers"),
    ],
)
def test_refused(changes: dict[str, int], tensor: int, pipeline: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shards(changed(**changes), tensor, pipeline)


def test_experts_that_do_not_divide_are_refused() -> None:
    assert any(isinstance(layer.feed_forward, MoeSpec) for layer in MOE.layers)
    with pytest.raises(ConfigError, match="50 columns of an expert"):
        shards(changed("qwen3-30b-a3b", moe_intermediate_size=50), 4)
