"""Groups of ranks in several processes and how they meet; the only file that uses torch.distributed.

It makes no default process group, so that a process can have several engines, and reads nothing from the environment.
Gloo serves CPUs and NCCL serves GPUs, where every call only queues work on the current stream.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from nanovllm.distributed.group import Group, Parallel, Rank

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import TCPStore as Store


class ProcessGroup(Group):
    """Ranks in several processes."""

    def __init__(self, rank: int, size: int, backend: Any, *, in_order: bool = False) -> None:
        self.rank = rank
        self.size = size
        self._backend = backend  # a ProcessGroupGloo or ProcessGroupNCCL
        self._in_order = in_order

    def in_order(self) -> ProcessGroup:
        """The same group with an `all_reduce` that adds in the order of ranks: the bits of a sum then depend on its own
        summands alone, not on the shape of the tensor."""
        return ProcessGroup(self.rank, self.size, self._backend, in_order=True)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of `x` over all ranks, written over `x`."""
        if self._in_order and self.size > 2:  # the sum of two does not depend on the order
            parts = self._gathered(x)
            x.copy_(parts[0])
            for part in parts[1:]:
                x += part
        else:
            _done(self._backend.allreduce([x], _queued("AllreduceOptions")))
        return x

    def all_gather(self, x: Tensor, dim: int = -1) -> Tensor:
        """Concatenate the `x` of all ranks, which have the same shape, along `dim` in the order of ranks."""
        dim %= x.dim()
        return self._gathered(x).movedim(0, dim).flatten(dim, dim + 1)

    def _gathered(self, x: Tensor) -> Tensor:  # [size, *x.shape]
        out = x.new_empty(self.size, *x.shape)
        _done(self._backend._allgather_base(out.view(-1), x.reshape(-1), _queued("AllgatherOptions")))
        return out

    def gather(self, x: Tensor, to: int, dim: int = -1) -> Tensor | None:
        """As `all_gather`, but only rank `to` gets the result; the others get None."""
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
        """Write the `x` of rank `source` over the `x` of all ranks."""
        options = _queued("BroadcastOptions")
        options.rootRank = source
        _done(self._backend.broadcast([x], options))
        return x

    def send(self, x: Tensor, to: int) -> None:
        _done(self._backend.send([x.contiguous()], to, 0))

    def receive(self, x: Tensor, source: int) -> Tensor:
        """Wait for the tensor that rank `source` sends, and write it over `x`."""
        _done(self._backend.recv([x], source, 0))
        return x

    def smallest(self, value: int, device: torch.device) -> int:
        """The smallest `value` of all ranks, which are on devices of this kind."""
        import torch

        return int(self.all_gather(torch.tensor([value], device=device)).min())

    def close(self) -> None:
        if self._backend is not None:
            self._backend.shutdown()
            self._backend = None


def _done(work: Any) -> None:
    """Wait for a collective. NCCL returns None if it has queued it on the current stream."""
    if work is not None:
        work.wait()


def _queued(options: str) -> Any:
    """Options of a collective that runs on the current stream of a GPU, in order with the kernels there."""
    from torch.distributed import distributed_c10d

    made = getattr(distributed_c10d, options)()
    made.asyncOp = False
    return made


def sampling_rank(ranks: Rank) -> int:
    """The index of the rank that samples and returns results: the first one of the last stage. `ranks`: any of them.

    All ranks have a step's tokens, but only this one has the logprobs.
    """
    return ranks.world_size - ranks.tensor_parallel_size


def open_store(host: str) -> Store:
    """On rank 0: start the server where ranks find each other. It listens at `host` on a free port, `.port`."""
    from torch.distributed import TCPStore

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno())
        listener.detach()  # the store owns it now
    return store


def join(
    rank: Rank,
    device: torch.device,
    *,
    host: str,
    port: int,
    store: Store | None = None,  # on rank 0: what `open_store` returned
    timeout_seconds: float,
) -> Parallel:
    """Connect to the other ranks through rank 0's store. Raises if they do not all join within the timeout.

    The timeout also applies to each later collective, so it limits how much longer than another a rank may load.
    """
    if rank.world_size == 1:
        return Parallel(rank)
    from torch.distributed import PrefixStore, TCPStore

    timeout = timedelta(seconds=timeout_seconds)
    if store is None:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    store.set_timeout(timeout)
    own_address = _own_address(host, port)

    def group(name: str, index: int, size: int) -> ProcessGroup:
        return ProcessGroup(
            index, size, make_backend(PrefixStore(name, store), index, size, device, own_address, timeout)
        )

    stage, shard = rank.pipeline_rank, rank.tensor_rank
    world = group("world", rank.index, rank.world_size)
    if rank.pipeline_parallel_size == 1:
        return Parallel(rank, tensor=world, world=world)
    if rank.tensor_parallel_size == 1:
        return Parallel(rank, pipeline=world, world=world)
    return Parallel(
        rank,
        tensor=group(f"tensor of stage {stage}", shard, rank.tensor_parallel_size),
        pipeline=group(f"pipeline of shard {shard}", stage, rank.pipeline_parallel_size),
        world=world,
    )


def make_backend(store: Any, rank: int, size: int, device: torch.device, own_address: str, timeout: timedelta) -> Any:
    """The torch.distributed backend of a group."""
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
    """This machine's address on the network of `host`; nothing is sent."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
