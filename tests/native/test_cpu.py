"""The level of instructions that a CPU's description gives."""

import pytest

from nanovllm.native.cpu import best_level, has_matrix_unit

N1 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp"
V1 = f"{N1} sve i8mm bf16"
A72 = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
HASWELL = "fpu sse2 ssse3 fma cx16 sse4_1 sse4_2 movbe popcnt avx f16c abm bmi1 avx2 bmi2"
SKYLAKE_X = f"{HASWELL} avx512f avx512dq avx512cd avx512bw avx512vl"
ICE_LAKE = f"{SKYLAKE_X} avx512_vnni"
SANDY_BRIDGE = "fpu sse2 ssse3 cx16 sse4_1 sse4_2 popcnt avx"


def arm(*cores: str) -> str:
    return "\n\n".join(f"processor\t: {i}\nFeatures\t: {core}\nCPU part\t: 0xd0c" for i, core in enumerate(cores))


def x86(flags: str) -> str:
    return f"processor\t: 0\nmodel name\t: some CPU\nflags\t\t: {flags}\nvmx flags\t: vnmi\n"


@pytest.mark.parametrize(
    ("machine", "cpuinfo", "name"),
    [
        ("aarch64", arm(N1, N1), "aarch64-dotprod"),
        ("aarch64", arm(V1), "aarch64-i8mm"),
        ("aarch64", arm(V1, N1), "aarch64-dotprod"),
        ("aarch64", arm(V1, A72), None),
        ("aarch64", arm(A72), None),
        ("x86_64", x86(HASWELL), "x86_64-avx2"),
        ("x86_64", x86(SKYLAKE_X), "x86_64-avx512"),
        ("x86_64", x86(ICE_LAKE), "x86_64-avx512vnni"),
        ("x86_64", x86(SANDY_BRIDGE), None),
        ("x86_64", "", None),
        ("riscv64", arm(N1), None),
    ],
)
def test_level(machine: str, cpuinfo: str, name: str | None) -> None:
    level = best_level(machine, cpuinfo)
    assert (level.name if level else None) == name


@pytest.mark.parametrize(
    ("cpuinfo", "has"),
    [
        (x86(f"{ICE_LAKE} avx512_bf16 amx_bf16 amx_tile amx_int8"), True),
        (x86(f"{ICE_LAKE} avx512_bf16 amx_tile amx_int8"), False),
        (x86(ICE_LAKE), False),
        (arm(V1), False),
    ],
)
def test_matrix_unit(cpuinfo: str, has: bool) -> None:
    assert has_matrix_unit(cpuinfo) == has
