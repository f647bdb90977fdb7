"""Cross-compile the native library for all CPUs, for a wheel: python -m nanovllm.native.prebuild FOLDER. Needs Zig."""

import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from nanovllm.native.build import SOURCES, prebuilt_name, source_files
from nanovllm.native.compiler import Compiler, find_zig
from nanovllm.native.cpu import LEVELS, CpuLevel

GLIBC = "2.28"  # the oldest that torch's wheels run on


def prebuild(zig: Compiler, levels: Iterable[CpuLevel], *, sources: Path, folder: Path) -> None:
    """Write a library for each level into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for level in levels:
        target = ("-target", f"{level.machine}-linux-gnu.{GLIBC}")
        with tempfile.TemporaryDirectory() as scratch:
            output = Path(scratch, prebuilt_name(level, sources))
            zig.compile(source_files(sources), (*target, *zig.flags(level)), output)
            (folder / output.name).write_bytes(output.read_bytes())
        print(folder / output.name)


if __name__ == "__main__":
    found = find_zig()
    if found is None or len(sys.argv) != 2:
        sys.exit("usage: python -m nanovllm.native.prebuild FOLDER, after pip install ziglang")
    prebuild(found, LEVELS, sources=SOURCES, folder=Path(sys.argv[1]))
