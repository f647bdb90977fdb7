"""The running requests as the device side sees them: a fixed row each, row 0 for padding."""

import numpy as np
import torch
from torch import Tensor

from nanovllm.plan import NewRow, StepPlan


class RequestTable:
    """Token values live on the device; lengths and block tables, which never depend on a token's value, on the host."""

    def __init__(self, *, max_num_seqs: int, max_model_len: int, block_size: int, device: torch.device) -> None:
        num_rows = max_num_seqs + 1
        self.tokens = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.length = np.zeros(num_rows, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows, dtype=np.int64)
        self.blocks = np.zeros((num_rows, -(-max_model_len // block_size)), dtype=np.int64)
        self.requests: list[NewRow | None] = [None] * num_rows

    def apply(self, plan: StepPlan) -> None:
        """Take in what a plan says has changed."""
        for new in plan.new_rows:
            self.requests[new.row] = new
            self.length[new.row] = len(new.token_ids)
            self.num_prompt_tokens[new.row] = new.num_prompt_tokens
            self.blocks[new.row, : len(new.block_table)] = new.block_table
            values = torch.tensor(new.token_ids, dtype=torch.int32)
            self.tokens[new.row, : len(new.token_ids)] = values.to(self.tokens.device)
        for grown in plan.new_blocks:
            self.blocks[grown.row, grown.index : grown.index + len(grown.blocks)] = grown.blocks

    def advance(self, rows: np.ndarray, device_rows: Tensor, positions: Tensor, tokens: Tensor) -> None:
        """Append the sampled `tokens`, [n], to their rows, at `positions`."""
        self.tokens[device_rows, positions] = tokens.to(torch.int32)
        self.length[rows] += 1

    def request(self, row: int) -> NewRow:
        request = self.requests[row]
        assert request is not None, f"row {row} was planned before it was filled"
        return request
