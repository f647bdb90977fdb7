"""The GPU's memory: an error that says what to lower when it runs out, and what is given back when a runner closes."""

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakSet

import torch

from nanovllm.errors import ConfigError

# Process-wide because what it counts is: torch keeps one cuBLAS workspace per stream for the whole process. Holds the
# runners that use a GPU.
_HOLDERS: WeakSet[object] = WeakSet()


def release_memory(holder: object) -> None:
    """Return torch's unused GPU memory to the system; to be called once `holder` has dropped its tensors.

    The cuBLAS workspaces are freed with the last holder: the recorded graphs of another one would still use them.
    """
    _HOLDERS.discard(holder)
    if not _HOLDERS:
        torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()


@contextmanager
def starting_on_gpu(holder: object, device: torch.device) -> Iterator[None]:
    """While `holder` builds itself: make its device the current one, register it for `release_memory`, and turn an
    out-of-memory error into one that says which options to lower."""
    _HOLDERS.add(holder)
    if device.index is not None:
        torch.cuda.set_device(device)
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        gib = 2**30
        raise ConfigError(
            f"the GPU ran out of memory at the start ({free / gib:.1f} of {total / gib:.1f} GiB are free now): lower "
            "gpu_memory_utilization, max_num_batched_tokens or max_num_seqs, take a smaller model, or end other "
            f"programs on this GPU. torch said: {str(error).splitlines()[0]}"
        ) from error
