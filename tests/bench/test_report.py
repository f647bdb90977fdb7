"""Reports: the same numbers as a table and as JSON; peak memory is that of this process alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.bench.compare_transformers import _agreement
from nanovllm.bench.report import Report
from nanovllm.cli.main import main

ROWS = [
    {"batch_size": 1, "step_ms": 30.984, "tokens_per_second": 1234.56},
    {"batch_size": 64, "step_ms": 5.0, "tokens_per_second": 0.5},
]


def test_table() -> None:
    text = str(Report("latency", {"model": "tiny"}, {"input_len": 8}, ROWS))
    assert text == "\n".join(
        [
            "latency",
            "",
            "model      tiny",
            "input len  8",
            "",
            "batch size  step ms  tokens/second",
            "         1    30.98          1,235",
            "        64     5.00          0.500",
        ]
    )


def test_texts_stand_left_and_parts_in_a_line() -> None:
    rows = [{"run": "1", "seconds": 2.5}, {"run": "median", "seconds": 10.0}]
    text = str(Report("startup", {}, {"phases": {"weights": 1.25, "first_step": 0.5}}, rows))
    assert text.endswith("phases  weights 1.25, first step 0.500\n\nrun     seconds\n1          2.50\nmedian    10.00")


def test_single_result_stands_upright() -> None:
    text = str(Report("throughput", {"model": "tiny"}, {}, [{"output_tokens": 133966, "seconds": 2.0}]))
    assert text.endswith("\n\noutput tokens  133,966\nseconds        2.00")


def test_json() -> None:
    report = Report("latency", {"model": "tiny"}, {"input_len": 8}, ROWS)
    found = json.loads(report.to_json())
    assert found == {
        "benchmark": "latency",
        "environment": {"model": "tiny"},
        "settings": {"input_len": 8},
        "results": ROWS,
    }


def test_peak_memory_is_of_this_process_alone() -> None:
    ballast = bytearray(b"x" * (256 << 20))  # held by the parent; must not count in the child's number
    script = "from nanovllm.bench.report import peak_memory; print(peak_memory()['peak_rss_mib'])"
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=True)
    assert 5 < float(done.stdout) < len(ballast) >> 20


def test_agreement_counts_up_to_the_first_difference() -> None:
    assert _agreement([[1, 2, 3], [4, 5]], [[1, 2, 3], [4, 5]]) == 1.0
    assert _agreement([[1, 2, 3, 4], [5, 6]], [[1, 9, 3, 4], [5, 6]]) == 3 / 6


def test_comparison_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", "compare-transformers"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "needs the transformers package: pip install transformers" in err
