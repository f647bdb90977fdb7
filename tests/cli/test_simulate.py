"""`nanovllm simulate`: JSON documents, answers, plots, refused options."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from nanovllm.cli.main import main

Cli = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parent.parent.parent
EXCERPT = ROOT / "tests" / "data" / "traces" / "mooncake_excerpt.jsonl"
SMALL = ["--synthetic", "groups=8,prefix=64,unique=8,output=2:6", "--num-requests", "60", "--rate", "200"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main(["simulate", *arguments])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def document(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(run(capsys, *arguments, "--json"))


def test_one_policy_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, *SMALL, "--replicas", "3").splitlines()
    table = {line.rpartition("  ")[0].strip(): line.split()[-1] for line in lines if line}
    assert table["model"] == "qwen3-8b"
    assert table["replicas"] == "3"
    assert table["refused"] == "0"
    for name in ("requests/s", "output tokens/s", "cache hit %", "ttft p99 ms", "tpot mean ms", "e2e p90 ms", "busy %"):
        assert float(table[name].replace(",", "")) > 0


def test_comparison_and_plot(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "fleet.svg"
    found = document(capsys, *SMALL, "--replicas", "4", "--compare", "--plot", str(plot))
    assert found["settings"]["replicas"] == 4
    rates = {row["policy"]: row["cache_hit_percent"] for row in found["results"]}
    assert list(rates) == ["prefix", "round-robin", "least-loaded", "one-big"]
    assert rates["round-robin"] + 5 < rates["prefix"] <= rates["one-big"]
    texts = [element.text for element in ElementTree.fromstring(plot.read_text()).iter() if element.text]
    assert set(rates) <= set(texts)
    assert "time to first token" in texts


def test_a_trace(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "--trace", str(EXCERPT), "--num-requests", "20", "--rate", "20", "--replicas", "2")
    (row,) = found["results"]
    assert row["requests"] == found["settings"]["requests"] == 20
    assert found["settings"]["arrivals_seconds"] == pytest.approx(19 / 20)
    assert row["seconds"] > 19 / 20


def test_how_many_replicas(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "search.svg"
    question = [*SMALL, "--step-time", "10,0.1,2", "--find", "--tpot-p99", "0.025"]
    found = document(capsys, *question, "--plot", str(plot))
    enough = found["settings"]["enough"]
    kept = {row["replicas"]: row["tpot_p99_ms"] <= 25 for row in found["results"]}
    assert enough > 1
    assert kept[enough]
    assert not kept[enough - 1]
    assert "time per output token, p99" in plot.read_text()
    assert run(capsys, *question).splitlines()[-1] == f"{enough} replicas are enough"


def test_not_enough_replicas_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *SMALL, "--find", "--ttft-p99", "0.0001", "--max-replicas", "3"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "3 replicas are not enough"


def test_options_reach_the_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    def row(*options: str) -> dict[str, Any]:
        return document(capsys, *SMALL, "--replicas", "2", *options)["results"][0]

    usual = row()
    assert row("--no-enable-prefix-caching")["cache_hit_percent"] == 0
    assert row("--bandwidth", "1")["tpot_mean_ms"] > 2 * usual["tpot_mean_ms"]
    assert row("--overhead-ms", "10")["tpot_mean_ms"] > usual["tpot_mean_ms"] + 9
    assert row("--tflops", "10")["ttft_mean_ms"] > usual["ttft_mean_ms"]
    assert row("--model-shape", "qwen3-0.6b")["tpot_mean_ms"] < usual["tpot_mean_ms"] / 3
    assert row("--max-num-seqs", "1")["ttft_mean_ms"] > 2 * usual["ttft_mean_ms"]
    assert row("--max-num-batched-tokens", "8")["steps"] > usual["steps"]  # the default max_num_seqs gives way
    one_at_a_time = row("--num-kv-cache-blocks", "5", "--kv-cache-block-size", "16")
    assert one_at_a_time["ttft_mean_ms"] > 2 * usual["ttft_mean_ms"]
    assert row("--num-kvcache-blocks", "5", "--kvcache-block-size", "16") == one_at_a_time
    assert row("--max-model-len", "70")["refused"] > 0
    assert row("--seed", "1") != usual
    one_group = ("--synthetic", "groups=1,prefix=64,unique=8,output=6")
    assert row(*one_group, "--max-lead", "60")["max_requests_over_mean"] == 2  # all of them
    assert row(*one_group, "--max-lead", "1")["max_requests_over_mean"] < 1.3
    assert row("--max-ratio", "9")["requests"] == 60
    settings = document(capsys, *SMALL, "--memory-gib", "30")["settings"]
    assert settings["kv_cache_tokens"] < document(capsys, *SMALL)["settings"]["kv_cache_tokens"] / 5


def test_the_same_numbers_in_every_process() -> None:
    command = [sys.executable, "-m", "nanovllm", "simulate", *SMALL, "--replicas", "3", "--compare", "--json"]
    runs = [
        subprocess.check_output(
            command, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}, text=True, timeout=120
        )
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--trace FILE or with --synthetic SPEC"),
        (["--trace", "a", "--synthetic", ""], "--trace FILE or with --synthetic SPEC"),
        ([*SMALL, "--find"], "--find needs a limit"),
        ([*SMALL, "--ttft-p99", "1"], "--ttft-p99 works only with --find"),
        ([*SMALL, "--max-replicas", "4"], "--max-replicas works only with --find"),
        ([*SMALL, "--find", "--ttft-p99", "1", "--replicas", "3"], "--find and --replicas"),
        ([*SMALL, "--find", "--ttft-p99", "1", "--compare"], "--find and --compare"),
        ([*SMALL, "--compare", "--policy", "prefix"], "--compare and --policy"),
        ([*SMALL, "--policy", "best"], "--policy"),
        ([*SMALL, "--policy", "one-big", "--max-lead", "2"], "--max-lead applies to the policy prefix"),
        ([*SMALL, "--max-ratio", "0.9"], "--max-ratio"),
        ([*SMALL, "--step-time", "1,2"], "step_time='1,2'"),
        ([*SMALL, "--step-time", "1,2,3", "--tflops", "4"], "--step-time and --tflops"),
        ([*SMALL, "--rate", "inf"], "--rate"),
        ([*SMALL, "--seed", "-1"], "--seed"),
        ([*SMALL, "--replicas", "0"], "--replicas"),
        ([*SMALL, "--replica", "2"], "did you mean --replicas"),
        ([*SMALL, "--model-shape", "qwen3-8"], "did you mean 'qwen3-8b'"),
        ([*SMALL, "--memory-gib", "10"], "qwen3-8b does not fit into 10 GiB"),
        (
            [*SMALL, "--max-num-batched-tokens", "100", "--max-num-seqs", "101"],
            "max_num_batched_tokens=100: must be at least max_num_seqs=101",
        ),
        ([*SMALL, "--kv-cache-block-size", "20"], "kv_cache_block_size=20: must be a multiple of 16"),
        ([*SMALL, "--plot", "/nowhere/at/all.svg"], "there is no folder"),
        (["--trace", str(EXCERPT), "--seed", "3"], "--seed works only with --synthetic"),
        (["--trace", str(ROOT / "README.md")], "TIMESTAMP"),
        (["--synthetic", "grops=3"], "'grops=3'"),
    ],
)
def test_wrong_commands(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["simulate", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert not printed.out


def test_when_all_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plot = tmp_path / "fleet.svg"
    (row,) = document(capsys, *SMALL, "--max-model-len", "10", "--plot", str(plot))["results"]
    assert (row["requests"], row["refused"], row["ttft_p99_ms"]) == (0, 60, None)
    ElementTree.fromstring(plot.read_text())
    assert run(capsys, *SMALL, "--max-model-len", "10").splitlines()[-1].split()[-1] == "0.000"


def test_a_missing_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--trace", "no/such/file.jsonl"]) == 1
    assert "no/such/file.jsonl" in capsys.readouterr().err


def test_help_names_every_option(cli: Cli) -> None:
    done = cli("simulate", "--help")
    assert done.returncode == 0
    for option in ("--trace", "--find", "--step-time", "--max-lead", "--plot", "examples:"):
        assert option in done.stdout
