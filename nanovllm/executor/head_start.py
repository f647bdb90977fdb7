"""Starts slow preparations in threads before torch is imported: reading weight files, loading torch's library, opening
the GPU.

The import takes seconds, mostly on one core. All of this would also happen later: errors are ignored here, since the
code that needs the result reports them.
"""

import ctypes
import importlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from nanovllm.config import Config
from nanovllm.kernels.device import usable

CUDA_SUCCESS = 0
BYTES_AHEAD = 16 << 30  # of weights: more might evict from memory what was read first


def head_start(config: Config, path: Path) -> None:
    if config.load_format != "dummy":
        files = [path] if path.is_file() else _weight_files(path)
        _begin(lambda: _ask_for(files))
    if sys.platform == "linux" and "torch" not in sys.modules and not _torch_has_cuda():
        _load_small_libraries(config)
        _begin(_load_library_of_torch)
    alone = config.tensor_parallel_size == config.pipeline_parallel_size == 1
    here = alone and config.distributed_executor_backend is None
    # if torch is already imported, the program may have chosen another GPU
    if here and config.device != "cpu" and "torch" not in sys.modules and _torch_has_cuda():
        _begin(_open_first_gpu)


def _begin(task: Callable[[], None]) -> None:
    """Run a task in a thread. It is no daemon: the process must not unload libraries while the task uses them."""
    threading.Thread(target=task, name="nanovllm-head-start").start()


def _weight_files(folder: Path) -> Sequence[Path]:
    from nanovllm.checkpoint.safetensors import weight_files

    return weight_files(folder)


def _ask_for(files: Sequence[Path]) -> None:
    """Ask the operating system to read files into memory."""
    if not hasattr(os, "posix_fadvise"):
        return
    left = BYTES_AHEAD
    for path in files:
        with suppress(OSError), path.open("rb") as file:
            size = min(left, os.fstat(file.fileno()).st_size)
            os.posix_fadvise(file.fileno(), 0, size, os.POSIX_FADV_WILLNEED)
            left -= size
        if not left:
            break


def _libraries_of_torch() -> Path | None:
    """The folder with the libraries of the torch that will be imported."""
    torch = importlib.util.find_spec("torch")
    return None if torch is None or torch.origin is None else Path(torch.origin).parent / "lib"


def _torch_has_cuda() -> bool:
    """Whether the torch that will be imported is built for CUDA."""
    folder = _libraries_of_torch()
    return folder is not None and (folder / "libtorch_cuda.so").exists()


def _load_small_libraries(config: Config) -> None:
    """Load what the main thread needs to read a GGUF file and to build a tokenizer: the dynamic linker serves one
    thread at a time, so it would have to wait until torch's library is loaded."""
    importlib.import_module("mmap")
    if not config.skip_tokenizer_init:
        importlib.import_module("tokenizers.models").BPE()  # the first one asks the linker for a function of the system


def _load_library_of_torch() -> None:
    """Load the largest library of a torch for CPUs, after those that torch too loads before it.

    This takes 0.3 s. A call of `dlopen`, unlike `ctypes.CDLL`, lets Python run meanwhile.
    """
    folder, dlopen = _libraries_of_torch(), ctypes.CDLL(None).dlopen
    if folder is not None:
        dlopen(bytes(folder / "libtorch_global_deps.so"), os.RTLD_LAZY | os.RTLD_GLOBAL)
        dlopen(bytes(folder / "libtorch_cpu.so"), os.RTLD_LAZY)


def _open_first_gpu() -> None:
    """Create the CUDA context that torch will use on the first visible GPU, and prepare Triton in another thread."""
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # torch sets it too, but the driver reads it when it starts
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) != CUDA_SUCCESS or driver.cuDeviceGet(ctypes.byref(device), 0) != CUDA_SUCCESS:
        return
    if usable("cuda"):
        from nanovllm.kernels.compile_ahead import prepare_triton

        _begin(prepare_triton)
    driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
