"""Causal convolution over the sequences of a step, in which every channel has its own filter."""

import torch
from torch import Tensor

from nanovllm.layers.sequences import Sequences


def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, sequences: Sequences) -> Tensor:
    """y[t] = sum over i of weight[:, i] * x[t - kernel_size + 1 + i], in float32.

    x: [num_tokens, channels]. weight: [channels, 1, kernel_size]. state: [rows, kernel_size - 1, channels], the newest
    inputs of each row, which are replaced. There is no loop over sequences and nothing that waits for the device.
    """
    num_before = weight.shape[2] - 1
    s, num_seqs = sequences, len(sequences.rows)
    rows, numbers = s.rows.long(), torch.arange(num_seqs, device=x.device)
    taps = torch.arange(num_before, device=x.device)
    # the inputs of a sequence one after the other: those in its state, then the new ones
    before = state[rows].masked_fill((s.starts <= 0)[:, None, None], 0.0)
    if len(x) == num_seqs:  # one new token of each
        state[rows] = torch.cat([before[:, 1:], x[:, None].to(state.dtype)], dim=1)
        return _sum_of_taps([*before.float().unbind(dim=1), x.float()], weight, bias)
    first = s.first_tokens + num_before * numbers  # [num_seqs] index of each sequence's first input
    at = torch.arange(len(x), device=x.device) + num_before * (s.token_seqs + 1)  # [num_tokens] index of each new one
    inputs = x.new_empty((len(x) + num_before * num_seqs, x.shape[1]), dtype=torch.float32)
    inputs[first[:, None] + taps] = before.float()
    inputs[at] = x.float()
    state[rows] = inputs[(first + s.num_new)[:, None] + taps].to(state.dtype)
    return _sum_of_taps([inputs[at - num_before + tap] for tap in range(num_before + 1)], weight, bias)


def _sum_of_taps(inputs: list[Tensor], weight: Tensor, bias: Tensor | None) -> Tensor:
    """`inputs`: of each tap, the newest last, [num_tokens, channels]."""
    *before, newest = inputs
    y = newest * weight[:, 0, len(before)].float()
    for tap, one in enumerate(before):
        y = torch.addcmul(y, one, weight[:, 0, tap].float())
    return y if bias is None else y + bias.float()
