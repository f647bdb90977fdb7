"""CUDA graphs: a step is recorded once for each of a few batch sizes, then launched as a whole."""

from collections.abc import Callable, Hashable
from typing import Any

import torch


class Graphs:
    """Records the kernels that functions launch, and replays them.

    All graphs share one memory pool: the result of a replay is valid until the next replay of any graph.
    """

    def __init__(self, device: torch.device) -> None:
        self._recorded: dict[Hashable, tuple[Any, Any]] = {}  # (graph, what the function returned)
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        with torch.cuda.stream(self._stream):
            # cuBLAS allocates its workspace for this stream here, before free memory is measured
            torch.ones(16, 16, device=device) @ torch.ones(16, 16, device=device)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._recorded

    def replay(self, key: Hashable) -> Any:
        """Launch a recorded graph; returns what its function returned."""
        graph, result = self._recorded[key]
        graph.replay()
        return result

    def record(self, key: Hashable, function: Callable[[], Any]) -> None:
        """Record `function`, which must have run before, so that all kernels are compiled and loaded."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
        torch.cuda.current_stream().wait_stream(self._stream)
        self._recorded[key] = graph, result

    def close(self) -> None:
        self._recorded.clear()
