"""The result of a step: copied to the host while the next step runs, read when `wait` is called."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from nanovllm.plan import StepResult, TokenLogprobs

if TYPE_CHECKING:
    from nanovllm.runner.logprobs import RowScores
    from nanovllm.runner.prompt_outputs import PendingPrompts
    from nanovllm.runner.verification import Verification


def to_host(tensor: Tensor) -> Tensor:
    """Queue a copy into pinned memory; valid once an event recorded after it has passed."""
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class PendingStep:
    """A launched step; `wait` returns its tokens."""

    def __init__(
        self,
        tokens: Tensor | None,  # [num_sampled], all that a row has sampled next to each other
        logprobs: "RowScores | None",
        device: torch.device,
        *,
        verification: "Verification | None" = None,
        prompts: "PendingPrompts | None" = None,
    ) -> None:
        self._tokens = None if tokens is None else to_host(tokens)
        self._logprobs = None if logprobs is None else logprobs.map(to_host)
        self._verification = verification
        self._prompts = None if prompts is None else prompts.map(to_host)
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()
            self._event.record()

    def sample(self, masks: Mapping[int, Sequence[bytes]]) -> None:
        raise AssertionError("a step without guided rows has sampled already")

    def wait(self) -> StepResult:
        if self._event is not None:
            self._event.synchronize()
        tokens, logprobs = self._read_tokens(), self._read_logprobs()
        if self._verification is not None:
            tokens, logprobs = self._verification.kept([token for (token,) in tokens], logprobs)
        prompts = {} if self._prompts is None else self._prompts.read()
        return StepResult(tokens=tokens, logprobs=logprobs, **prompts)

    def _read_tokens(self) -> list[list[int]]:
        return [] if self._tokens is None else self._tokens.numpy()[:, None].tolist()

    def _read_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        return {} if self._logprobs is None else self._logprobs.read()
