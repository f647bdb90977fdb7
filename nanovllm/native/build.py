"""The C library for CPUs: prebuilt in the package, or compiled at first use and kept in the cache folder.

A library's file name has a digest of all that it was made from, so that a stale one is never loaded.
"""

import ctypes
import functools
import hashlib
import os
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nanovllm.native.compiler import CompileError, Compiler, find_compilers
from nanovllm.native.cpu import CpuLevel, this_cpu
from nanovllm.native.trust import UntrustedError, trusted_file, trusted_folder
from nanovllm.utils.default_model import cache_dir
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)

SOURCES = Path(__file__).parent / "src"
PREBUILT = Path(__file__).parent / "prebuilt"
# The errors of one attempt, after which the next one is made: OSError is a folder that cannot be written, or a library
# that the dynamic linker refuses.
FAILURES = (CompileError, UntrustedError, OSError)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The library for this CPU; None where there is none, after a log line that says why."""
    level = this_cpu()
    if level is None:
        logger.info("no native library: it needs Linux on an Arm CPU with dotprod or an x86 CPU with AVX2 and FMA")
        return None
    return find_library(level, sources=SOURCES, prebuilt=PREBUILT, cache=cache_dir() / "native")


def find_library(level: CpuLevel, *, sources: Path, prebuilt: Path, cache: Path) -> ctypes.CDLL | None:
    """Load the library from the folder `prebuilt`, else from the cache, else compile it. None after a log line."""
    path = prebuilt / prebuilt_name(level, sources)
    if path.exists():
        try:
            return load(path)
        except FAILURES as error:
            logger.warning("the prebuilt native library is not used: %s", error)
    reasons = []
    for compiler in find_compilers():
        try:
            return _compiled(compiler, level, sources, cache)
        except FAILURES as error:
            reasons.append(str(error))
    reason = "; ".join(reasons) or "no C compiler was found; install gcc or clang, or run `pip install ziglang`"
    logger.warning("no native library, the CPU runs torch's operations, which are slower: %s", reason)
    return None


def load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(trusted_file(path)))


def declare(library: ctypes.CDLL, signatures: Mapping[str, tuple[Any, list[Any]]]) -> ctypes.CDLL:
    """Set the types of functions: of the result and of the arguments."""
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def prebuilt_name(level: CpuLevel, sources: Path) -> str:
    return f"{level.name}-{_digest(_contents(sources))}.so"


def cached_name(compiler: Compiler, level: CpuLevel, sources: Path) -> str:
    parts = [*_contents(sources), *compiler.command, compiler.version(), *compiler.flags(level)]
    return f"{level.name}-{_digest(parts)}.so"


def _compiled(compiler: Compiler, level: CpuLevel, sources: Path, cache: Path) -> ctypes.CDLL:
    """The library of one compiler from the cache; from a temporary folder where the cache cannot be used."""
    flags = compiler.flags(level)
    name = cached_name(compiler, level, sources)
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        return _from_cache(compiler, flags, sources, trusted_folder(cache) / name)
    except (UntrustedError, OSError) as error:
        logger.warning("the native library cannot be kept, it is compiled at every start: %s", error)
    with tempfile.TemporaryDirectory(prefix="nanovllm-") as scratch:
        return load(_compile(compiler, flags, sources, Path(scratch) / name))  # the file is not needed once loaded


def _from_cache(compiler: Compiler, flags: Iterable[str], sources: Path, path: Path) -> ctypes.CDLL:
    if path.exists():
        try:
            return load(path)
        except (UntrustedError, OSError) as error:
            logger.warning("a native library in the cache is not used but replaced: %s", error)
    return load(_compile(compiler, flags, sources, path))


def _compile(compiler: Compiler, flags: Iterable[str], sources: Path, path: Path) -> Path:
    """Compile to a temporary file and rename it: several processes may do so at once, none sees half a file."""
    logger.info("compiling the native library for this CPU with %s (once, takes seconds)", compiler.name)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compile-") as scratch:
        output = Path(scratch) / path.name
        compiler.compile(source_files(sources), flags, output)
        output.chmod(0o700)  # whatever the umask is
        os.replace(output, path)
    logger.debug("compiled %s in %.1f s", path, time.perf_counter() - begin)
    return path


def source_files(sources: Path) -> list[Path]:
    return sorted(sources.glob("*.c"))


def _contents(sources: Path) -> list[str]:
    """Names and texts of all that the compiler reads."""
    return [text for path in sorted(sources.glob("*.[ch]")) for text in (path.name, path.read_text("utf-8"))]


def _digest(parts: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{len(part)} {part}".encode())
    return digest.hexdigest()[:16]
