"""Log-probabilities of chosen tokens and of the most likely ones beside them."""

import torch
from torch import Tensor

from nanovllm.plan import TokenLogprobs


def score(logprobs: Tensor, chosen: Tensor, num_top: int) -> list[TokenLogprobs]:
    """[rows, vocab] log-probabilities and [rows] chosen tokens -> one entry a row."""
    own = logprobs.gather(1, chosen[:, None])
    rank = (logprobs > own).sum(dim=-1) + 1
    top, ids = logprobs.topk(min(num_top, logprobs.shape[1]), dim=-1)
    all_ids = torch.cat([chosen[:, None], ids], dim=1).tolist()
    values = torch.cat([own, top], dim=1).tolist()
    return [TokenLogprobs(tuple(i), tuple(v), r) for i, v, r in zip(all_ids, values, rank.tolist(), strict=True)]


class PendingLogprobs:
    """Scores of one step's sampled tokens; read only when the step's result is."""

    def __init__(self, logprobs: Tensor, chosen: Tensor, wanted: list[tuple[int, int]]) -> None:
        self._logprobs, self._chosen = logprobs, chosen
        self._wanted = wanted  # (index among the sampled rows, number of alternatives)

    def wait(self) -> dict[int, list[TokenLogprobs]]:
        most = max(num_top for _, num_top in self._wanted)
        rows = score(self._logprobs, self._chosen, most)
        return {
            index: [TokenLogprobs(row.token_ids[: num_top + 1], row.logprobs[: num_top + 1], row.rank)]
            for (index, num_top), row in zip(self._wanted, rows, strict=True)
        }
