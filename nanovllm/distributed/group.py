"""Who computes together: the ranks of an engine, and what they say to each other; the only file that knows
torch.distributed.

No default process group is made, so that several engines can live in one process, and nothing is read from the
environment. Gloo carries tensors of CPUs, NCCL those of GPUs: there every call only queues work on the current stream.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import TCPStore as Store


class Group:
    """A set of ranks as one of them sees it. A group of one does nothing."""

    def __init__(self, rank: int = 0, size: int = 1, backend: Any = None, *, in_order: bool = False) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend  # a ProcessGroupGloo or ProcessGroupNCCL
        self._in_order = in_order

    def in_order(self) -> Group:
        """The same group, which adds in the order of ranks: a sum's bits then do not depend on the tensor around it."""
        return Group(self.rank, self.size, self._backend, in_order=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over all ranks, written over `x`."""
        if self.size == 1:
            return x
        if self._in_order and self.size > 2:  # two numbers have one order
            parts = self._gathered(x)
            x.copy_(parts[0])
            for part in parts[1:]:
                x += part
        else:
            _done(self._backend.allreduce([x], _queued("AllreduceOptions")))
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Everyone's `x`, of one shape, side by side along `dim` in the order of ranks."""
        if self.size == 1:
            return x
        dim %= x.dim()
        return self._gathered(x).movedim(0, dim).flatten(dim, dim + 1)

    def _gathered(self, x: Tensor) -> Tensor:  # [size, *x.shape]
        out = x.new_empty(self.size, *x.shape)
        _done(self._backend._allgather_base(out.view(-1), x.reshape(-1), _queued("AllgatherOptions")))
        return out

    def gather(self, x: Tensor, to: int, dim: int = -1) -> Tensor | None:
        """The same for rank `to` alone; None for the others."""
        if self.size == 1:
            return x
        options = _queued("GatherOptions")
        options.rootRank = to
        if self.rank != to:
            _done(self._backend.gather([], [x.contiguous()], options))
            return None
        out = x.new_empty(self.size, *x.shape)
        _done(self._backend.gather([list(out.unbind())], [x.contiguous()], options))
        dim %= x.dim()
        return out.movedim(0, dim).flatten(dim, dim + 1)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """`x` of the group's rank `source`, written over everyone's."""
        if self.size > 1:
            options = _queued("BroadcastOptions")
            options.rootRank = source
            _done(self._backend.broadcast([x], options))
        return x

    def send(self, x: Tensor, to: int) -> None:
        _done(self._backend.send([x.contiguous()], to, 0))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """What rank `source` sent, written over `x`."""
        _done(self._backend.recv([x], source, 0))
        return x

    def close(self) -> None:
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None


def _done(work: Any) -> None:
    """Wait for an exchange; NCCL has nothing to wait for where it queued one on the current stream."""
    if work is not None:
        work.wait()


def _queued(options: str) -> Any:
    """Options of an exchange that runs on the current stream of a GPU, in line with the kernels there."""
    from torch.distributed import distributed_c10d

    made = getattr(distributed_c10d, options)()
    made.asyncOp = False
    return made


ALONE = Group()


@dataclass(frozen=True)
class Place:
    """Who a worker is: ranks of one pipeline stage follow each other, stage after stage."""

    rank: int = 0  # pipeline_rank * tensor_parallel_size + tensor_rank
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    local_rank: int = 0  # which of its host's devices

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tensor_rank(self) -> int:
        return self.rank % self.tensor_parallel_size

    @property
    def pipeline_rank(self) -> int:
        return self.rank // self.tensor_parallel_size

    @property
    def carries_result(self) -> bool:
        """Whether its results are the whole ones: all ranks have a step's tokens, but logprobs only who drew them."""
        return self.rank == self.result_rank

    @property
    def result_rank(self) -> int:
        """The rank that draws tokens: the first of the last stage."""
        return self.world_size - self.tensor_parallel_size


@dataclass(frozen=True)
class Parallel:
    """A worker's place and the groups it belongs to."""

    place: Place
    tensor: Group  # those that share its layers
    pipeline: Group  # those with the same share of other layers
    world: Group

    @classmethod
    def alone(cls) -> Parallel:
        return cls(Place(), ALONE, ALONE, ALONE)

    def close(self) -> None:
        """Leave all groups. Who still waits for this rank gets an error."""
        for group in (self.tensor, self.pipeline, self.world):
            group.close()


def open_store(host: str) -> Store:
    """Where ranks find each other, kept by rank 0: a server at `host` alone, on a free port, which `.port` tells."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno())
        listener.detach()  # the store has it
    return store


def join(
    place: Place,
    device: torch.device,
    *,
    host: str,
    port: int,
    store: Store | None = None,  # rank 0's own
    timeout_seconds: float,
) -> Parallel:
    """Meet the other ranks at rank 0's store. All ranks must join; who waits longer than the timeout raises.

    The timeout also bounds each later exchange, and so how much longer than another a rank may take to load weights.
    """
    if place.world_size == 1:
        return Parallel(place, ALONE, ALONE, ALONE)
    from torch.distributed import PrefixStore, TCPStore

    timeout = timedelta(seconds=timeout_seconds)
    if store is None:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(timeout)
    own_address = _own_address(host, port)

    def group(name: str, rank: int, size: int) -> Group:
        return Group(rank, size, make_backend(PrefixStore(name, store), rank, size, device, own_address, timeout))

    stage, share = place.pipeline_rank, place.tensor_rank
    world = group("world", place.rank, place.world_size)
    if place.pipeline_parallel_size == 1:
        return Parallel(place, tensor=world, pipeline=ALONE, world=world)
    if place.tensor_parallel_size == 1:
        return Parallel(place, tensor=ALONE, pipeline=world, world=world)
    return Parallel(
        place,
        tensor=group(f"tensor of stage {stage}", share, place.tensor_parallel_size),
        pipeline=group(f"pipeline of share {share}", stage, place.pipeline_parallel_size),
        world=world,
    )


def make_backend(store: Any, rank: int, size: int, device: torch.device, own_address: str, timeout: timedelta) -> Any:
    """What carries a group's exchanges."""
    import torch.distributed as dist

    if device.type == "cuda":
        nccl: Any = dist.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timeout
        return nccl(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own_address)]
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _own_address(host: str, port: int) -> str:
    """This machine's address on the network where `host` is; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
