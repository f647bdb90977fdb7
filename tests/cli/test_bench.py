"""The benchmarks through real processes, as small as they get: their documents are complete and consistent."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Cli = Callable[..., subprocess.CompletedProcess[str]]

SMALL = ["--kv-cache-memory-bytes", "16M"]


def document(done: subprocess.CompletedProcess[str], benchmark: str) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["benchmark"] == benchmark
    assert found["environment"]["dtype"] == "float32"
    return found


def test_throughput(cli: Cli, tiny_model: Path) -> None:
    options = ["--num-seqs", "5", "--input-len", "4:9", "--output-len", "6:12", "--max-tokens", "8", *SMALL]
    done = cli("bench", "throughput", "--model", tiny_model, *options, "--json")
    (result,) = document(done, "throughput")["results"]
    assert 20 <= result["input_tokens"] <= 45
    assert 30 <= result["output_tokens"] <= 40
    assert result["steps"] >= 8
    assert result["mean_batch"] == result["output_tokens"] / result["steps"]
    assert result["output_tokens_per_second"] == result["output_tokens"] / result["seconds"]
    assert result["startup_seconds"] > 0
    assert 100 < result["peak_rss_mib"] < 20_000


def test_throughput_as_a_table(cli: Cli, tiny_model: Path) -> None:
    options = ["--num-seqs", "2", "--input-len", "4", "--output-len", "6", *SMALL]
    done = cli("bench", "throughput", "--model", tiny_model, *options)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    table = {line[0]: line[-1].strip() for line in lines if len(line) > 1}
    assert (table["input tokens"], table["output tokens"], table["requests"]) == ("8", "12", "2")
    assert float(table["output tokens/second"].replace(",", "")) > 0


def test_throughput_refuses_a_workload_that_would_be_cut(cli: Cli, tiny_model: Path) -> None:
    done = cli("bench", "throughput", "--model", tiny_model, "--max-model-len", "512", *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert "max_model_len=512: the longest request of this workload needs 20" in done.stderr


def test_latency(cli: Cli, tiny_model: Path) -> None:
    options = ["--batch-sizes", "1,3", "--input-len", "8", "--output-len", "6", *SMALL]
    results = document(cli("bench", "latency", "--model", tiny_model, *options, "--json"), "latency")["results"]
    assert [row["batch_size"] for row in results] == [1, 3]
    for row in results:
        assert row["steps"] == 4  # six tokens: one of the prefill, and the last step ends the requests
        assert 0 < row["step_median_ms"] <= row["step_p99_ms"]
        assert 0 < row["ttft_first_ms"] <= row["ttft_last_ms"]
        assert row["tokens_per_second"] == pytest.approx(row["batch_size"] / row["step_median_ms"] * 1e3)


def test_startup(cli: Cli, tiny_model: Path) -> None:
    done = cli("bench", "startup", "--runs", "1", "--model", tiny_model, *SMALL, "--json")
    row, median = document(done, "startup")["results"]
    assert {**median, "run": "1"} == row
    phases = ["interpreter", "torch", "tokenizer", "weights", "first_step"]
    assert all(row[phase] > 0 for phase in phases)
    assert row["total_seconds"] == pytest.approx(sum(row[phase] for phase in [*phases, "other"]))
    assert row["other"] < row["total_seconds"] / 2


@pytest.mark.parametrize("weights", ["own", "random"])
def test_compare_transformers(cli: Cli, tiny_model: Path, weights: str) -> None:
    lengths = ["--num-seqs", "3", "--input-len", "4:9", "--output-len", "3:6", "--stream-len", "4"]
    options = ["--random-weights"] if weights == "random" else []
    command = ["bench", "compare-transformers", "--model", str(tiny_model), "--dtype", "float32", "--rounds", "2"]
    results = document(cli(*command, *lengths, *options, *SMALL, "--json"), "compare-transformers")["results"]
    rounds = [(row["case"], row["round"]) for row in results]
    assert rounds == [(case, number) for number in ("1", "2", "median") for case in ("batch", "stream")]
    assert all(row["agreement"] == 1.0 for row in results)  # the same weights, so the same tokens
    batch = [row["ratio"] for row in results if row["case"] == "batch"]
    assert batch[2] == pytest.approx((batch[0] + batch[1]) / 2)
