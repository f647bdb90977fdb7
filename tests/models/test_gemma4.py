"""Gemma 4: the spelling of published configs, and what is refused."""

import json
from typing import Any

import pytest

from nanovllm.errors import CheckpointError
from nanovllm.models.registry import parse_config
from tests.helpers import model_dir


def raw_config(**changes: Any) -> dict[str, Any]:
    return json.loads((model_dir("gemma4") / "config.json").read_text()) | changes


def test_both_spellings_of_the_size_of_full_attention() -> None:
    new = raw_config()
    assert new.pop("per_layer_config") == {"2": {"head_dim": 32, "num_key_value_heads": 1}}
    published = new | {"global_head_dim": 32, "num_global_key_value_heads": 1}
    assert parse_config(published) == parse_config(raw_config())
    text = {"architectures": ["Gemma4ForConditionalGeneration"], "text_config": published, "dtype": "float32"}
    assert parse_config(text).layers == parse_config(raw_config()).layers
    sliding, full = (parse_config(published).layers[index].mixer for index in (0, 2))
    assert (sliding.head_dim, sliding.num_kv_heads, sliding.values_are_keys) == (16, 2, False)
    assert (full.head_dim, full.num_kv_heads, full.values_are_keys, full.scale) == (32, 1, True, 1.0)
    apart = parse_config(published | {"attention_k_eq_v": False}).layers[2].mixer
    assert (apart.num_kv_heads, apart.values_are_keys) == (2, False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 100},
            "vocab_size_per_layer_input=100 is below vocab_size=160",
        ),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers=1 leaves no layer of every kind"),
        ({"enable_moe_block": True}, "enable_moe_block=True is not implemented"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not implemented"),
        ({"hidden_activation": "relu"}, "hidden_activation='relu'"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(raw_config(**changes))
