"""Ranks as Ray's actors: one a device, packed into as few hosts as hold them.

Commands and replies are the same frames as between processes, so Ray's own serialization sees nothing but bytes.
"""

import os
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec

from nanovllm.errors import ConfigError
from nanovllm.executor.interrupts import Uninterrupted
from nanovllm.executor.messages import Lost, Reply
from nanovllm.executor.team import Replies
from nanovllm.executor.worker import RealModel, Worker
from nanovllm.remote.frames import FrameReader, to_frame

SECONDS_TO_PLACE = 60.0  # until the cluster has room for all ranks


class ActorWorker:
    """What runs in an actor's process."""

    def __init__(self) -> None:
        self._worker = Worker(RealModel())

    def address(self) -> tuple[str, str, int]:
        """Of this host: Ray's name for it and where it is reached; and the process."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def obey(self, frames: bytes) -> bytes:
        """Replies to commands, as frames."""
        replies = (self._worker.obey(frame) for frame in FrameReader().feed(frames) if not self._worker.stopped)
        return b"".join([to_frame(reply) for reply in replies if reply is not None])


class Session:
    """This process's place in a Ray cluster: taken by the first crew if the program has none, and left by the last."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_crews = 0
        self._ours = False

    def enter(self) -> None:
        import ray

        with self._lock:
            if not ray.is_initialized():
                address = os.environ.get("RAY_ADDRESS") or "local"
                ray.init(address=address, include_dashboard=False if address == "local" else None)
                self._ours = True
            self._num_crews += 1

    def leave(self) -> None:
        import ray

        with self._lock:
            self._num_crews -= 1
            if self._ours and not self._num_crews:
                ray.shutdown()
                self._ours = False


SESSION = Session()


class RayCrew:
    def __init__(self, size: int, *, device: str) -> None:
        try:
            import ray
        except ImportError as error:
            raise ConfigError(
                "distributed_executor_backend='ray': Ray is not installed; pip install nanovllm[ray]"
            ) from error
        self.size = size
        self._ray: Any = ray
        self._decoder = msgspec.msgpack.Decoder(Reply)
        self._pending: dict[Any, int] = {}  # Ray's promises of replies, with the rank that gave each
        self._group: Any = None
        self._actors: list[Any] = []
        self._closed = False
        SESSION.enter()
        try:
            self._place(device)
        except BaseException:
            self.end()
            raise

    def _place(self, device: str) -> None:
        ray = self._ray
        on_gpu = device == "cuda" or (device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        need = {"GPU": 1} if on_gpu else {"CPU": 1}
        self._group = ray.util.placement_group([need] * self.size, strategy="PACK")
        if not self._group.wait(SECONDS_TO_PLACE):
            raise ConfigError(
                f"tensor_parallel_size, pipeline_parallel_size: the Ray cluster has no room for {self.size} workers "
                f"of {need} each; it has {ray.available_resources()}"
            )
        actor = ray.remote(ActorWorker)
        self._actors = [
            actor.options(
                num_gpus=need.get("GPU", 0),
                num_cpus=need.get("CPU", 0),
                max_restarts=0,
                scheduling_strategy=ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
                    placement_group=self._group, placement_group_bundle_index=index
                ),
            ).remote()
            for index in range(self.size)
        ]
        self._number_by_host()

    def _number_by_host(self) -> None:
        """Ranks that follow each other, and so those that share layers, are put on one host where that is possible."""
        addresses = self._ray.get([actor.address.remote() for actor in self._actors])
        num_on = Counter(node for node, _, _ in addresses)
        order = sorted(range(self.size), key=lambda index: (-num_on[addresses[index][0]], addresses[index][0], index))
        self._actors = [self._actors[index] for index in order]
        self.nodes = [addresses[index][0] for index in order]
        self.host = addresses[order[0]][1]
        self.pids = [addresses[index][2] for index in order]
        self.num_local = [num_on[node] for node in self.nodes]
        self.local_ranks = [0] * self.size  # Ray shows an actor its own GPU alone

    def send(self, frame: bytes, ranks: Iterable[int]) -> None:
        with Uninterrupted():
            for rank in ranks:
                self._pending[self._actors[rank].obey.remote(frame)] = rank

    def receive(self, timeout: float | None) -> Replies:
        if not self._pending:  # nothing was asked; what becomes of this tells who is gone
            self.send(b"", range(self.size))
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout)
        return [reply for promise in ready for reply in self._kept(promise)]

    def _kept(self, promise: Any) -> Replies:
        ray = self._ray
        rank = self._pending[promise]
        try:
            frames = FrameReader().feed(ray.get(promise))
        except ray.exceptions.RayError as error:
            return [(rank, Lost(f"is gone: {_first_line(error)}"))]
        finally:
            del self._pending[promise]
        return [(rank, self._decoder.decode(frame)) for frame in frames]

    def end(self, patience: float = 0.0) -> Replies:
        if self._closed:
            return []
        replies: Replies = []
        if self._pending:
            ready, _ = self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=patience)
            replies = [reply for promise in ready for reply in self._kept(promise)]
        self._close()
        return replies

    def close(self, farewell: bytes, timeout: float) -> None:
        if self._closed:
            return
        try:
            self.send(farewell, range(self.size))
            self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=timeout)
        finally:
            self._close()

    def _close(self) -> None:
        self._closed = True
        with suppress(self._ray.exceptions.RayError):  # the cluster may be gone, and with it all that is to end
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._actors, self._group, self._pending = [], None, {}
        SESSION.leave()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
