"""The gate of an MLP with GELU, in the approximation with tanh."""

import torch.nn.functional as F
from torch import Tensor


def gelu_and_mul(gate_up: Tensor) -> Tensor:  # [num_tokens, 2 * size] -> [num_tokens, size]
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)
