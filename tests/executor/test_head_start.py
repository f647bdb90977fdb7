"""Work started before torch is imported: the right files and the right GPU, and no error where there is none."""

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nanovllm.config import Config
from nanovllm.errors import CheckpointError
from nanovllm.executor import head_start as module
from nanovllm.executor.head_start import head_start


class FakeDriver:
    """libcuda of a machine with the given number of GPUs."""

    def __init__(self, num_gpus: int) -> None:
        self.num_gpus = num_gpus
        self.calls: list[str] = []

    def cuInit(self, flags: int) -> int:
        self.calls.append("init")
        return 0 if self.num_gpus else 100

    def cuDeviceGet(self, device: object, ordinal: int) -> int:
        self.calls.append(f"get {ordinal}")
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, device: ctypes.c_int) -> int:
        self.calls.append("retain")
        return 0


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state at the start of a process whose torch is built for CUDA."""
    monkeypatch.setattr(module, "_torch_has_cuda", lambda: True)
    monkeypatch.delitem(sys.modules, "torch", raising=False)


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tasks that were started; none of them runs."""
    names: list[str] = []
    monkeypatch.setattr(module, "_begin", lambda task: names.append(task.__name__))
    return names


OPENED = "_open_first_gpu"


def test_gpu_is_opened_where_it_will_be_used(without_torch: None, begun: list[str]) -> None:
    head_start(Config(load_format="dummy"), Path())
    assert begun == [OPENED]


@pytest.mark.parametrize(
    "options",
    [
        {"device": "cpu"},
        {"tensor_parallel_size": 2},
        {"pipeline_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
    ],
)
def test_gpu_is_left_alone(without_torch: None, begun: list[str], options: dict) -> None:
    head_start(Config(load_format="dummy", **options), Path())
    assert begun == []


def test_gpu_is_left_to_a_torch_that_is_there(monkeypatch: pytest.MonkeyPatch, begun: list[str]) -> None:
    monkeypatch.setattr(module, "_torch_has_cuda", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", threading)
    head_start(Config(load_format="dummy"), Path())
    assert begun == []


@pytest.mark.parametrize("num_gpus", [0, 2])
def test_one_context_on_the_first_gpu(monkeypatch: pytest.MonkeyPatch, begun: list[str], num_gpus: int) -> None:
    driver = FakeDriver(num_gpus)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(module, "usable", lambda device: True)
    monkeypatch.setenv("CUDA_MODULE_LOADING", "")  # so that monkeypatch restores it
    monkeypatch.delenv("CUDA_MODULE_LOADING")
    module._open_first_gpu()
    assert driver.calls == (["init", "get 0", "retain"] if num_gpus else ["init"])
    assert begun == (["prepare_triton"] if num_gpus else [])
    assert os.environ["CUDA_MODULE_LOADING"] == "LAZY"


def test_no_driver_is_no_error(monkeypatch: pytest.MonkeyPatch, begun: list[str]) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: no such file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    module._open_first_gpu()
    assert begun == []


LOADED = """
import sys
from pathlib import Path
from nanovllm.config import Config
from nanovllm.executor import head_start as module
begun = []
module._begin = begun.append
module._torch_has_cuda = lambda: len(sys.argv) > 1
module.head_start(Config(load_format="dummy", device="cpu"), Path())
for task in begun:
    task()
assert "torch" not in sys.modules
print("libtorch_cpu.so" in Path("/proc/self/maps").read_text())
import torch
torch.ones(3) @ torch.ones(3)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="libraries are loaded early on Linux only")
@pytest.mark.parametrize("has_cuda", [False, True])
def test_library_of_torch_is_loaded_early_if_it_is_one_for_cpus(has_cuda: bool) -> None:
    if module._torch_has_cuda():
        pytest.skip("this torch is built for CUDA")
    command = [sys.executable, "-c", LOADED, *(["cuda"] if has_cuda else [])]
    printed = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    assert printed.split() == [str(not has_cuda)]


def test_files_are_asked_for_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [tmp_path / name for name in ("a", "missing", "b", "c")]
    for file in (files[0], files[2], files[3]):
        file.write_bytes(bytes(100))
    asked: list[int] = []
    monkeypatch.setattr(module, "BYTES_AHEAD", 150)
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, offset, size, advice: asked.append(size), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_WILLNEED", 3, raising=False)
    module._ask_for(files)
    assert asked == [100, 50]


def test_missing_weights_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no"):
        head_start(Config(), tmp_path)


def test_module_is_free_of_torch() -> None:
    script = "import sys, nanovllm.executor.head_start\nsys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False, timeout=60).returncode == 0
