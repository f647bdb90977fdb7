"""The checks can fail: they find every bug of `mutants.py`, and pass on the real code."""

import struct

import pytest

from .mutants import FIRST_WITH_ROWS, MUTANTS, run_workload

WORKLOADS = range(30, FIRST_WITH_ROWS + 50)


def test_the_real_code_passes_and_the_workloads_are_not_idle() -> None:
    runs = [run_workload(seed) for seed in WORKLOADS]
    sequences = [seq for run in runs for seq, _ in run.sequences]
    assert sum(run.block_manager.num_hit_tokens for run in runs) > 1000
    assert sum(run.scheduler.num_preemptions for run in runs) > 100
    assert {seq.finish_reason for seq in sequences} == {"stop", "length", "abort"}
    assert any(seq.num_preemptions > 1 for seq in sequences)
    num_verified, num_right = (sum(getattr(run.device, name) for run in runs) for name in ("num_verified", "num_right"))
    assert num_verified > num_right + 100 > 200


@pytest.mark.parametrize("name", MUTANTS)
def test_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for edit in MUTANTS[name]:
        edit.apply(monkeypatch)
    with pytest.raises((AssertionError, LookupError, ValueError, TypeError, StopIteration, struct.error)):
        for seed in WORKLOADS:
            run_workload(seed)
