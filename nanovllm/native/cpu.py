"""Which instructions this CPU has, in levels: the library is compiled once for each level."""

import platform
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class CpuLevel:
    name: str
    machine: str  # as platform.machine() names it
    features: frozenset[str]  # what the CPU must have, as /proc/cpuinfo names it
    cc_flags: tuple[str, ...]  # for gcc and clang
    zig_cpu: str  # the same for Zig, whose -mcpu has names of its own


_ARM = frozenset({"asimddp", "asimdhp", "fphp", "atomics", "asimdrdm"})  # what armv8.2-a+dotprod+fp16 lets cc use
_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2"})
_AVX512 = frozenset({"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"})
# On x86 each feature has its flag: gcc knows -march=x86-64-v3 only from version 11 on.
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2")
_AVX512_FLAGS = ("-mavx512f", "-mavx512bw", "-mavx512cd", "-mavx512dq", "-mavx512vl")
# With -O3 gcc 12 takes half as long again on x86, and the code was not measurably faster. On Arm -O2 was not measured.
_OPTIMIZED = ("-O2", "-ftree-vectorize")
_ZIG_AVX2 = "x86_64+avx2+fma+f16c+bmi+bmi2"
_ZIG_AVX512 = f"{_ZIG_AVX2}+avx512f+avx512bw+avx512cd+avx512dq+avx512vl"
_TUNED = "-mtune=neoverse-n1"  # the order of instructions, not which; a tenth faster than without
_ZIG_ARM = "generic+v8_2a+dotprod+fullfp16"

# The best first.
LEVELS = (
    CpuLevel(
        "aarch64-i8mm",
        "aarch64",
        _ARM | {"i8mm"},
        ("-O3", "-march=armv8.2-a+dotprod+fp16+i8mm", _TUNED),
        f"{_ZIG_ARM}+i8mm",
    ),
    CpuLevel("aarch64-dotprod", "aarch64", _ARM, ("-O3", "-march=armv8.2-a+dotprod+fp16", _TUNED), _ZIG_ARM),
    CpuLevel(
        "x86_64-avx512vnni",
        "x86_64",
        _AVX2 | _AVX512 | {"avx512_vnni"},
        (*_OPTIMIZED, *_AVX2_FLAGS, *_AVX512_FLAGS, "-mavx512vnni"),
        f"{_ZIG_AVX512}+avx512vnni",
    ),
    CpuLevel(
        "x86_64-avx512",
        "x86_64",
        _AVX2 | _AVX512,
        (*_OPTIMIZED, *_AVX2_FLAGS, *_AVX512_FLAGS),
        _ZIG_AVX512,
    ),
    CpuLevel("x86_64-avx2", "x86_64", _AVX2, (*_OPTIMIZED, *_AVX2_FLAGS), _ZIG_AVX2),
)


# What the products of amx.c with bfloat16 use.
_AMX = frozenset({"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"})


def this_cpu() -> CpuLevel | None:
    """The best level that this machine's CPU has; None without any, or where Linux does not say."""
    return best_level(platform.machine(), CPUINFO.read_text()) if CPUINFO.exists() else None


def multiplies_bfloat16() -> bool:
    return CPUINFO.exists() and has_matrix_unit(CPUINFO.read_text())


def has_matrix_unit(cpuinfo: str) -> bool:
    """The one of x86, AMX."""
    return _features(cpuinfo) >= _AMX


def best_level(machine: str, cpuinfo: str) -> CpuLevel | None:
    features = _features(cpuinfo)
    return next((level for level in LEVELS if level.machine == machine and level.features <= features), None)


def _features(cpuinfo: str) -> frozenset[str]:
    """Of all cores, which may differ."""
    cores = [
        frozenset(value.split())
        for key, _, value in (line.partition(":") for line in cpuinfo.splitlines())
        if key.strip() in ("Features", "flags")  # on Arm, on x86
    ]
    return frozenset.intersection(*cores) if cores else frozenset()
