"""The gated delta rule in C (src/delta.c), token by token; its definition is `steps` in layers/delta_rule.py."""

import ctypes
from typing import Any

import torch
from torch import Tensor

POINTER = ctypes.c_void_p
COLUMNS, MOST_KEYS = 32, 256  # of a state: the number of columns is a multiple, and there are no more rows


class DeltaRule(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("num_sequences", "num_heads", "key_dim", "value_dim")),
        *((name, POINTER) for name in ("q", "k", "v", "factor", "beta", "out", "states")),
        ("state_stride", ctypes.c_int64),
        *((name, POINTER) for name in ("rows", "first_tokens", "num_new", "is_new")),
    )


def native_delta_rule_serves(key_dim: int, value_dim: int) -> bool:
    return value_dim % COLUMNS == 0 and key_dim <= MOST_KEYS


def native_delta_rule(
    products: Any,  # native/formats.py
    q: Tensor,  # [num_tokens, heads, key_dim]
    k: Tensor,
    v: Tensor,  # [num_tokens, heads, value_dim]
    decay: Tensor,  # [num_tokens, heads]
    beta: Tensor,
    *,
    state: Tensor,  # [rows, heads, key_dim, value_dim], of which rows may lie apart; replaced
    sequences: Any,  # of the step, see layers/sequences.py
) -> Tensor:  # as v
    inputs = [one.float().contiguous() for one in (q, k, v, decay.exp(), beta)]
    indices = [one.long().contiguous() for one in (sequences.rows, sequences.first_tokens, sequences.num_new)]
    is_new, out = (sequences.starts <= 0).contiguous(), torch.empty_like(inputs[2])
    num_heads, key_dim, value_dim = state.shape[1:]
    assert state.dtype == torch.float32 and state[0].is_contiguous() and native_delta_rule_serves(key_dim, value_dim)
    rule = DeltaRule(
        *(len(indices[0]), num_heads, key_dim, value_dim),
        *(one.data_ptr() for one in (*inputs, out, state)),
        state.stride(0),
        *(one.data_ptr() for one in (*indices, is_new)),
    )
    products.library.engine_delta_rule(products.engine, ctypes.byref(rule))
    return out
