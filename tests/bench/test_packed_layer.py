"""The comparison of decode steps with and without `packed_layer`: on a CPU, where no engine uses the kernel."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM
from nanovllm.bench.packed_layer import WAYS, measure, run_as, write_shape
from nanovllm.bench.tiny_model import write_tiny_model


def test_all_ways_are_measured(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    lines: list[str] = []
    engine: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "device": "cpu", "max_num_seqs": 8}

    def start() -> LLM:
        return LLM(str(tmp_path), max_model_len=2048, num_kv_cache_blocks=64, enable_prefix_caching=False, **engine)

    measure(["off", "on"], start, [1, 2], until=0, say=lines.append)
    assert [line.split()[0] for line in lines] == ["off", "on", "ms/token,", "off", "on"]
    assert "64 of 64 tokens as off" in lines[1] and "medians of 1 rounds, at 1, 2 sequences" in lines[2]


@pytest.mark.parametrize("way", WAYS)
def test_how_a_way_changes_launches(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.kernels.linear import packed_layer
    from nanovllm.layers import joined_layers

    launches: list[dict[str, Any]] = []
    monkeypatch.setattr(packed_layer, "launch", lambda *args, **options: launches.append(options))
    chosen = joined_layers.joins_layers
    with run_as(way):
        packed_layer.launch(pdl=True, launch_cooperative_grid=True)  # type: ignore[call-arg]
        assert (joined_layers.joins_layers is chosen) == (way != "off")
    assert launches == [{"pdl": True, "launch_cooperative_grid": way != "not cooperative"}]


def test_a_shape_with_fewer_layers(tmp_path: Path) -> None:
    import json

    write_shape(tmp_path, "qwen3-8b", layers=12, vocabulary=32_768)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["hidden_size"]) == (12, 32_768, 4096)
