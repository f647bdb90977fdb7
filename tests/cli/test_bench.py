"""The benchmarks in real processes with very small sizes: their JSON documents are complete and consistent."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nanovllm.bench.latency import busy_process

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
    found = document(done, "throughput")
    settings, (result,) = found["settings"], found["results"]
    assert 20 <= settings["input_tokens"] <= 45
    assert 30 <= settings["output_tokens"] <= 40
    assert 8 <= result["steps"] <= 9
    assert result["decode_steps"] == result["steps"] - 1  # all prompts fit into the first step
    assert result["mean_batch"] == settings["output_tokens"] / result["steps"]
    assert result["output_tokens_per_second"] == settings["output_tokens"] / result["seconds"]
    assert result["fraction_of_roofline"] == settings["least_seconds"] / result["seconds"]
    assert settings["least_seconds"] > 0
    assert 0 < settings["startup_phases"]["first_request"] < settings["startup_seconds"]
    assert 100 < settings["peak_rss_mib"] < 20_000


def test_throughput_as_a_table(cli: Cli, tiny_model: Path) -> None:
    options = ["--num-seqs", "2", "--input-len", "4", "--output-len", "6", *SMALL]
    done = cli("bench", "throughput", "--model", tiny_model, *options)
    assert done.returncode == 0, done.stderr
    lines = [line.split("  ") for line in done.stdout.splitlines()]
    table = {line[0]: line[-1].strip() for line in lines if len(line) > 1}
    assert (table["input tokens"], table["output tokens"], table["requests"]) == ("8", "12", "2")
    assert (table["steps"], table["decode steps"], table["mean batch"]) == ("6", "5", "2.00")
    for name in ("output tokens/second", "fraction of roofline", "copy gigabytes/second", "matmul teraflops"):
        assert float(table[name].replace(",", "")) >= 0
    assert "first request" in table["startup phases"]


def test_throughput_repeated(cli: Cli, tiny_model: Path) -> None:
    options = ["--num-seqs", "2", "--input-len", "4", "--output-len", "3", "--repeat", "3", *SMALL]
    done = cli("bench", "throughput", "--model", tiny_model, *options, "--json")
    found = document(done, "throughput")
    *runs, best, median = found["results"]
    assert [row["run"] for row in found["results"]] == ["1", "2", "3", "best", "median"]
    ranked = sorted(runs, key=lambda row: row["seconds"])
    assert ({**best, "run": ranked[0]["run"]}, {**median, "run": ranked[1]["run"]}) == (ranked[0], ranked[1])
    assert [row["steps"] for row in runs] == [3, 3, 3]
    assert all(row["decode_steps"] == 2 for row in runs)


def test_throughput_refuses_a_workload_that_would_be_cut(cli: Cli, tiny_model: Path) -> None:
    done = cli("bench", "throughput", "--model", tiny_model, "--max-model-len", "512", *SMALL)
    assert (done.returncode, done.stdout) == (2, "")
    assert "max_model_len=512: the longest request of this workload needs 20" in done.stderr


def test_latency(cli: Cli, tiny_model: Path) -> None:
    options = ["--batch-sizes", "1,3", "--input-len", "8", "--output-len", "6", "--beside-busy", *SMALL]
    results = document(cli("bench", "latency", "--model", tiny_model, *options, "--json"), "latency")["results"]
    assert [row["batch_size"] for row in results] == [1, 3]
    for row in results:
        assert row["steps"] == 4  # six tokens: one of the prefill, and the last step ends the requests
        assert 0 < row["ms_per_token"] <= row["step_p99_ms"]
        assert row["ttft_first_ms"] > 0 and row["prefill_seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(row["batch_size"] / row["ms_per_token"] * 1e3)
        assert row["fraction_of_roofline"] > 0 and row["prefill_fraction"] > 0
        assert (
            row["busy_p90_ratio"] == pytest.approx(row["busy_p90_ms"] / row["ms_per_token"]) and row["busy_p90_ms"] > 0
        )


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="times of a process are read from /proc")
def test_busy_process_ends_with_its_block() -> None:
    with pytest.raises(KeyboardInterrupt), busy_process() as process:
        begin = time.monotonic()
        while cpu_seconds(process.pid) < 0.1:
            assert process.poll() is None and time.monotonic() < begin + 30
        raise KeyboardInterrupt
    assert process.returncode is not None


def cpu_seconds(pid: int) -> float:
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def test_latency_leaves_the_first_steps_out(cli: Cli, tiny_model: Path) -> None:
    options = ["--batch-sizes", "2", "--output-len", "34", *SMALL]
    found = document(cli("bench", "latency", "--model", tiny_model, *options, "--json"), "latency")
    assert [row["steps"] for row in found["results"]] == [28]  # 32 steps decode, an eighth is left out
    assert found["settings"]["input_len"] == 128  # the default without a GPU


def test_perplexity(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    """The same as by transformers, over pieces that begin anew."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    files = [tmp_path / "first.txt", tmp_path / "second.txt"]
    files[0].write_text("The capital of Norway is Oslo. " * 3)
    files[1].write_text("Über sieben Brücken", encoding="utf-8")
    options = ["--texts", *files, "--piece-len", "16", "--dtype", "float32", *SMALL, "--json"]
    (row,) = document(cli("bench", "perplexity", "--model", tiny_model, *options), "perplexity")["results"]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_model), AutoTokenizer.from_pretrained(tiny_model)
    losses = []
    for file in files:
        ids = tokenizer(file.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
        for piece in ids.split(16):
            logits = model(piece[None]).logits[0, :-1].log_softmax(-1)
            losses.append(-logits.gather(1, piece[1:, None])[:, 0])
    expected = torch.cat(losses)
    assert row["tokens"] == len(expected)
    assert row["negative_log_likelihood"] == pytest.approx(expected.mean().item(), abs=1e-4)
    assert row["perplexity"] == pytest.approx(expected.mean().exp().item(), rel=1e-4)


def test_perplexity_refuses(cli: Cli, tiny_model: Path, tmp_path: Path) -> None:
    def error(*options: str | Path) -> str:
        done = cli("bench", "perplexity", "--model", tiny_model, *options, *SMALL)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        return done.stderr

    binary, empty = tmp_path / "binary", tmp_path / "empty"
    binary.write_bytes(b"\xff\xfe\xfd")
    empty.touch()
    assert "missing" in error("--texts", tmp_path / "missing")
    assert "can't decode" in error("--texts", binary)
    assert "fewer than two tokens" in error("--texts", empty)
    assert "piece_len=8192: must be from 2 to 4,095" in error("--texts", empty, "--piece-len", "8192")


def test_startup(cli: Cli, tiny_model: Path) -> None:
    done = cli("bench", "startup", "--runs", "1", "--model", tiny_model, *SMALL, "--json")
    row, median = document(done, "startup")["results"]
    assert {**median, "run": "1"} == row
    phases = ["interpreter", "torch", "tokenizer", "weights", "first_step"]
    assert all(row[phase] > 0 for phase in phases)
    assert row["total_seconds"] == pytest.approx(sum(row[phase] for phase in [*phases, "other"]))
    assert row["other"] < row["total_seconds"] / 2


def test_startup_of_a_shape(cli: Cli) -> None:
    options = ["--runs", "1", "--model-shape", "smollm2-135m", "--dtype", "float32", *SMALL, "--json"]
    found = document(cli("bench", "startup", *options), "startup")
    assert found["environment"]["model"] == "smollm2-135m"
    assert found["settings"]["prompt"] == "3 token ids"
    row = found["results"][0]
    assert row["tokenizer"] == 0
    assert row["weights"] > 0 and row["first_step"] > 0


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


def test_compare_llamacpp(cli: Cli, default_model_path: Path) -> None:
    command = ["bench", "compare-llamacpp", "--peer", "xllamacpp", "--rounds", "1", "--scale", "64", *SMALL, "--json"]
    results = document(cli(*command), "compare-llamacpp")["results"]
    cases = ["stream", "batch", "first 128", "first 512"]
    assert [(row["case"], row["round"]) for row in results] == [(case, n) for n in ("1", "median") for case in cases]
    for row in results:
        assert row["ratio"] == pytest.approx(row["llamacpp_seconds"] / row["nanovllm_seconds"])


def test_llamacpp_reads_gguf_files_only(cli: Cli, tiny_model: Path) -> None:
    done = cli("bench", "compare-llamacpp", "--model", str(tiny_model))
    assert done.returncode == 1 and "llama.cpp reads GGUF files" in done.stderr and "Traceback" not in done.stderr
