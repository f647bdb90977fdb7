"""Two versions of the package in turn, with a tiny model; here both are this one."""

import shutil
from pathlib import Path

import pytest

from nanovllm.bench import before_after
from tests.helpers import model_dir

PACKAGE = Path(before_after.__file__).parents[1]
SIZES = [
    *("--batch-sizes", "1", "2", "--input-len", "8", "--output-len", "4"),
    *("--num-seqs", "2", "--max-len", "8", "--vocab-size", "100", "--repeat", "1"),
]
ENGINE = '{"device": "cpu", "num_kv_cache_blocks": 16, "max_model_len": 64}'


def test_both_versions_are_measured(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The other version leaves a file where it runs."""
    shutil.copytree(PACKAGE, tmp_path / "nanovllm", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "nanovllm" / "__init__.py").open("a") as file:
        file.write(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    before_after.main([str(tmp_path), "--models", str(model_dir("qwen3")), *SIZES, "--engine", ENGINE])
    header, *rows = capfd.readouterr().out.splitlines()
    assert all(name in header for name in ("start", "prefill", "b1", "b2", "tokens/second"))
    assert [row.split()[1] for row in rows] == ["before", "after", "ratio"]
    assert (tmp_path / "ran").exists()


def test_a_folder_without_the_package(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        before_after.main([str(tmp_path), "--model-shapes", "qwen3-0.6b"])
    assert "has no folder nanovllm" in capsys.readouterr().err


def test_a_version_that_fails(tmp_path: Path) -> None:
    (tmp_path / "nanovllm").mkdir()
    with pytest.raises(SystemExit, match="ended with exit status 1"):
        before_after.run_version(tmp_path, {"engine": {}, "repeat": 1})
