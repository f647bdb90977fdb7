"""How the programs of packed_layer.py wait for each other.

An event is a result that all programs compute together: of o, of each block of gate and up, of down. One warp of a
program counts in global memory what this program has finished, and reports to its other warps what all programs have.

All programs of a launch must run at the same time, so the launch is cooperative: the driver starts all of them together
or, if they do not fit, raises an error. Two engines on one GPU could otherwise each hold a part of the multiprocessors
and wait for the rest. Cooperative launches may be recorded in graphs, and may begin before the kernel before them has
ended (programmatic dependent launch).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_wait

from nanovllm.kernels.linear.many_rows import _barrier

NUM_PROGRAMS = 128
PROGRAMS = gl.constexpr(NUM_PROGRAMS)
COUNTERS = 16  # in global memory, one for each event


@gluon.jit
def _count(counter):
    """Add one to `counter` once all that this program's warps have written before is visible to the others."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred %p;
        .reg .u32 %t;
        mov.u32 $0, 0;
        mov.u32 %t, %laneid;
        setp.eq.u32 %p, %t, 0;
        @%p red.release.gpu.global.add.u64 [$1], 1;
        }""",
        "=r,l",
        [counter],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _await(counter, goal):
    """Wait until `counter` has reached `goal`."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred %p<2>;
        .reg .u32 %t;
        .reg .u64 %v;
        mov.u32 $0, 0;
        mov.u32 %t, %laneid;
        setp.ne.u32 %p0, %t, 0;
        @%p0 bra REACHED;
        NOT_REACHED:
        ld.acquire.gpu.global.u64 %v, [$1];
        setp.lt.u64 %p1, %v, $2;
        @%p1 bra NOT_REACHED;
        REACHED:
        bar.warp.sync 0xffffffff;
        }""",
        "=r,l,l",
        [counter, goal],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _count_when_done(events, counters, event: gl.constexpr):
    mbarrier.wait(events[0].index(event), 0)
    _count(counters + event)


@gluon.jit
def _report(events, counters, goal, event: gl.constexpr):
    _await(counters + event, goal)
    mbarrier.arrive(events[1].index(event), count=1)


@gluon.jit
def exchange(events, counters, BLOCKS: gl.constexpr, WITH_QKV: gl.constexpr, PDL: gl.constexpr):
    """Count each event of this program, in order: o, the blocks of gate and up, down. Report those of all programs.

    A block is awaited when this program has finished the two after it. So programs may be some blocks apart, and none
    waits for one that is behind it before it has counted what that one waits for.
    """
    if PDL:
        gdc_wait()
    # Every launch adds PROGRAMS to each counter. This program's first event is still missing, so that fewer were added.
    goal = gl.load(counters, cache_modifier=".cg")
    goal += PROGRAMS - goal % PROGRAMS
    _count_when_done(events, counters, 0)
    _report(events, counters, goal, 0)
    for block in gl.static_range(1, BLOCKS + 1):
        _count_when_done(events, counters, block)
        if block > 2:
            _report(events, counters, goal, block - 2)
    for block in gl.static_range(max(1, BLOCKS - 1), BLOCKS + 1):
        _report(events, counters, goal, block)
    _count_when_done(events, counters, BLOCKS + 1)
    if WITH_QKV:
        _report(events, counters, goal, BLOCKS + 1)


@gluon.jit
def finish(events, event):
    """All warps have stored what belongs to this event."""
    _barrier()
    mbarrier.arrive(events[0].index(event), count=1)
