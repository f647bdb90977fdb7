"""The gate of the MLP."""

import torch.nn.functional as F
from torch import Tensor


def silu_and_mul(gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
