"""Kernels of a lower level than this CPU's: those of most other computers."""

import os
import subprocess
import sys
from pathlib import Path

from nanovllm.native.cpu import LEVELS, this_cpu

FILES = ("test_products.py", "test_attention.py", "test_sampling.py")
SCRIPT = """
import sys
import pytest
from nanovllm.native import build, cpu, support

level = next(level for level in cpu.LEVELS if level.name == sys.argv[1])
build.this_cpu = support.this_cpu = lambda: level
support.multiplies_bfloat16 = lambda: False  # AMX, which lower levels do not have
assert build.library() is not None
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


def test_the_lowest_level_of_this_machine() -> None:
    own = this_cpu()
    assert own is not None
    lowest = [level for level in LEVELS if level.machine == own.machine][-1]
    if lowest == own:
        return  # all other tests are of this level
    files = [str(Path(__file__).with_name(name)) for name in FILES]
    command = [sys.executable, "-c", SCRIPT, lowest.name, *files]
    environment = os.environ | {"HYPOTHESIS_PROFILE": "few"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
