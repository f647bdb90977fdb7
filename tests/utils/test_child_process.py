"""A child process runs the same package as its parent, wherever it is started."""

import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm
from nanovllm.utils.child_process import child_environment

WHERE = [sys.executable, "-c", "import nanovllm; print(nanovllm.__file__)"]


def test_the_package_is_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    found = subprocess.run(WHERE, env=child_environment(), cwd=tmp_path, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == nanovllm.__file__


def test_a_path_that_was_set_still_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    assert child_environment()["PYTHONPATH"].split(":")[-1] == "/somewhere"
