"""A group of one, rank numbers, and groups that cannot form; `test_parallel_models.py` has real groups."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from nanovllm.distributed.collectives import ProcessGroup, join, make_backend, open_store, sampling_rank
from nanovllm.distributed.group import Parallel, Rank

CPU = torch.device("cpu")


def test_alone() -> None:
    parallel = Parallel()
    x = torch.ones(3)
    group = parallel.tensor
    assert (group.rank, group.size) == (0, 1)
    assert group.all_reduce(x) is group.in_order().all_reduce(x) is group.gather(x, to=0) is x
    assert parallel.pipeline is parallel.world is None
    parallel.close()


def test_ranks() -> None:
    """Ranks are numbered stage after stage; the first rank of the last stage samples."""
    ranks = [Rank(index, 2, 3, 0) for index in range(6)]
    assert [(rank.pipeline_rank, rank.tensor_rank) for rank in ranks] == [(s, t) for s in range(3) for t in (0, 1)]
    assert {sampling_rank(rank) for rank in ranks} == {4}
    assert sampling_rank(Rank()) == 0 and Rank().world_size == 1


def test_one_rank_needs_no_meeting() -> None:
    assert join(Rank(), CPU, host="127.0.0.1", port=1, timeout_seconds=1).world is None


def test_who_waits_in_vain_raises() -> None:
    store = open_store("127.0.0.1")
    with pytest.raises(RuntimeError, match="timeout"):
        join(Rank(0, 2, 1, 0), CPU, host="127.0.0.1", port=store.port, store=store, timeout_seconds=0.2)


def test_stores_have_ports_of_their_own_on_one_address() -> None:
    first, second = open_store("127.0.0.1"), open_store("127.0.0.1")
    assert first.port != second.port
    listening = Path("/proc/net/tcp").read_text().split()
    assert f"0100007F:{first.port:04X}" in listening and f"00000000:{first.port:04X}" not in listening


def test_one_file_knows_torch_distributed() -> None:
    sources = (Path(__file__).parents[2] / "nanovllm").rglob("*.py")
    assert [path.name for path in sources if "torch.distributed" in path.read_text()] == ["collectives.py"]


@pytest.mark.gpu
def test_nccl_runs_in_line_with_kernels_and_in_a_graph() -> None:
    """A communicator of one rank in a group that claims to be larger, because more ranks need more GPUs."""
    device, store = torch.device("cuda", 0), open_store("127.0.0.1")
    group = ProcessGroup(0, 2, make_backend(store, 0, 1, device, "127.0.0.1", timedelta(seconds=60)))
    x, graph = torch.ones(1024, device=device), torch.cuda.CUDAGraph()

    def step() -> None:
        x.add_(1)
        group.broadcast(group.all_reduce(x), 0)
        x.mul_(2)

    step()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    graph.replay()
    graph.replay()
    assert x.tolist() == [22.0] * 1024
    group.close()


def test_placing_loads_no_torch() -> None:
    imports = "import sys; from nanovllm.distributed import group; from nanovllm.models import shard"
    code = f"{imports}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])
