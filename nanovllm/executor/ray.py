"""Workers as Ray actors: one per device, packed onto as few hosts as possible.

Commands and replies are the same frames as between processes, so Ray's own serialization handles nothing but bytes.
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
from nanovllm.executor.worker import RealModel, Worker
from nanovllm.executor.workers import Replies
from nanovllm.remote.transport import FrameReader, to_frame

SECONDS_TO_PLACE = 60.0  # until the cluster must have room for all ranks


class ActorWorker:
    """The program of an actor's process."""

    def __init__(self) -> None:
        self._worker = Worker(RealModel())

    def address(self) -> tuple[str, str, int]:
        """Ray's id of this host, its IP address, and the process id."""
        import ray

        return ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid()

    def obey(self, frames: bytes) -> bytes:
        """Obey the commands in these frames; returns the frames of the replies."""
        replies = (self._worker.obey(frame) for frame in FrameReader().feed(frames) if not self._worker.stopped)
        return b"".join([to_frame(reply) for reply in replies if reply is not None])


class Session:
    """This process's connection to a Ray cluster: the first executor opens it if the program has none, and the last
    executor closes it again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._ours = False

    def enter(self) -> None:
        import ray

        with self._lock:
            if not ray.is_initialized():
                address = os.environ.get("RAY_ADDRESS") or "local"
                ray.init(address=address, include_dashboard=False if address == "local" else None)
                self._ours = True
            self._num_users += 1

    def leave(self) -> None:
        import ray

        with self._lock:
            self._num_users -= 1
            if self._ours and not self._num_users:
                ray.shutdown()
                self._ours = False


SESSION = Session()  # process-wide, because Ray's connection is: a process has one


class RayWorkers:
    """Implements the `Workers` protocol."""

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
        self._pending: dict[Any, int] = {}  # Ray's references to replies to come, with their ranks
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
        """Number the actors so that consecutive ranks, with parts of the same layers, share a host if possible."""
        addresses = self._ray.get([actor.address.remote() for actor in self._actors])
        num_on = Counter(node for node, _, _ in addresses)
        order = sorted(range(self.size), key=lambda index: (-num_on[addresses[index][0]], addresses[index][0], index))
        self._actors = [self._actors[index] for index in order]
        self.nodes = [addresses[index][0] for index in order]
        self.host = addresses[order[0]][1]
        self.pids = [addresses[index][2] for index in order]
        self.num_local = [num_on[node] for node in self.nodes]
        self.local_ranks = [0] * self.size  # an actor sees only its own GPU

    def send(self, frame: bytes, ranks: Iterable[int]) -> None:
        with Uninterrupted():
            for rank in ranks:
                self._pending[self._actors[rank].obey.remote(frame)] = rank

    def receive(self, timeout: float | None) -> Replies:
        if not self._pending:  # an empty command, whose result shows whether the worker is alive
            self.send(b"", range(self.size))
        ready, _ = self._ray.wait(list(self._pending), num_returns=1, timeout=timeout)
        return [reply for reference in ready for reply in self._replies(reference)]

    def _replies(self, reference: Any) -> Replies:
        ray = self._ray
        rank = self._pending[reference]
        try:
            frames = FrameReader().feed(ray.get(reference))
        except ray.exceptions.RayError as error:
            return [(rank, Lost(f"is gone: {_first_line(error)}"))]
        finally:
            del self._pending[reference]
        return [(rank, self._decoder.decode(frame)) for frame in frames]

    def end(self, grace_seconds: float = 0.0) -> Replies:
        if self._closed:
            return []
        replies: Replies = []
        if self._pending:
            ready, _ = self._ray.wait(list(self._pending), num_returns=len(self._pending), timeout=grace_seconds)
            replies = [reply for reference in ready for reply in self._replies(reference)]
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
        with suppress(self._ray.exceptions.RayError):  # the cluster may be gone, and the actors with it
            for actor in self._actors:
                self._ray.kill(actor)
            if self._group is not None:
                self._ray.util.remove_placement_group(self._group)
        self._actors, self._group, self._pending = [], None, {}
        SESSION.leave()


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
