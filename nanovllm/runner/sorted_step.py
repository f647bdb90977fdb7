"""The result of a step whose rows the device had in another order than the plan: sorted by length."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import TokenLogprobs
from nanovllm.runner.logprobs import RowScores
from nanovllm.runner.results import PendingStep


class SortedStep(PendingStep):
    def __init__(
        self,
        tokens: Tensor | None,  # [num_sampled], in the order of the device
        logprobs: RowScores | None,
        device: torch.device,
        order: np.ndarray,  # [num_sampled] index of each token in the plan
    ) -> None:
        super().__init__(tokens, logprobs, device)
        self._order = order

    def _read_tokens(self) -> list[list[int]]:
        if self._tokens is None:
            return []
        tokens = self._tokens.numpy()
        planned = np.empty_like(tokens)
        planned[self._order] = tokens
        return planned[:, None].tolist()

    def _read_logprobs(self) -> dict[int, list[TokenLogprobs]]:
        return {int(self._order[index]): scores for index, scores in super()._read_logprobs().items()}
