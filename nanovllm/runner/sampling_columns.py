"""The sampling parameters of all rows in the request table, where our kernels read them."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import NewRow

COLUMNS = ("temperature", "top_k", "top_p", "min_p", "seed_low", "seed_high")
FLOAT_COLUMNS = ("temperature", "top_p", "min_p")  # their bits are stored in a table of int32


class SamplingColumns:
    def __init__(self, views: Mapping[str, Tensor]) -> None:
        """`views`: of the table's int32 tensor, [rows] for each of `COLUMNS`."""
        self.temperature = views["temperature"].view(torch.float32)  # 0 = greedy
        self.top_k = views["top_k"]  # 0 = off
        self.top_p = views["top_p"].view(torch.float32)
        self.min_p = views["min_p"].view(torch.float32)
        self.seed_low, self.seed_high = views["seed_low"], views["seed_high"]

    def values_of(self, new_rows: tuple[NewRow, ...]) -> dict[str, np.ndarray]:
        """The int32 numbers of each column for new rows, [num_new_rows] each."""
        params = [new.params for new in new_rows]
        seeds = np.array([new.seed for new in new_rows], dtype=np.int64).view(np.int32).reshape(-1, 2)  # low half first
        columns: dict[str, np.ndarray | list[int] | list[float]] = {
            "temperature": [0.0 if p.greedy else p.temperature for p in params],
            "top_k": [max(p.top_k, 0) for p in params],
            "top_p": [p.top_p for p in params],
            "min_p": [p.min_p for p in params],
            "seed_low": seeds[:, 0],
            "seed_high": seeds[:, 1],
        }
        return {
            name: np.array(values, dtype=np.float32 if name in FLOAT_COLUMNS else np.int32).view(np.int32)
            for name, values in columns.items()
        }
