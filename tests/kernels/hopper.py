"""Compiles kernels for Hopper on a machine without a GPU."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SHARED_MEMORY = 232_448  # bytes that one program may use
PROLOGUE = """
import torch, triton
from triton.backends.compiler import GPUTarget

class NoDriver:
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", 90, 32)

def compile(kernel, grid, *args, pdl=False, **options):
    compiled = kernel.warmup(*args, grid=grid, **options)
    instructions = [name for name in ("wgmma", "cp.async.bulk.tensor") if name in compiled.asm["ptx"]]
    assert compiled.asm["cubin"]
    print(kernel.__name__, grid[0], compiled.metadata.shared, *instructions)

triton.runtime.driver.set_active(NoDriver())
"""


@dataclass(frozen=True)
class Compiled:
    kernel: str
    num_programs: int  # along the first axis of the grid
    instructions: tuple[str, ...]  # of those that only Hopper and later GPUs have


def compile_for_hopper(script: str, folder: Path) -> list[Compiled]:
    """Run a script that puts `compile` in the place of `launch`. `folder`: of Triton's cache."""
    # without the GPU that a machine may have: the script decides which kernels are chosen
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(folder)}
    environment = os.environ | hidden
    command = [sys.executable, "-c", PROLOGUE + script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = []
    for line in done.stdout.splitlines():
        kernel, num_programs, shared, *instructions = line.split()
        assert int(shared) <= SHARED_MEMORY, line
        found.append(Compiled(kernel, int(num_programs), tuple(instructions)))
    return found
