"""Samples from the whole vocabulary in C (src/sampling.c): one pass, and noise only for tokens that could win."""

import ctypes

import torch
from torch import Tensor

from nanovllm.layers.noise import noise_keys
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.sampling import Sampler, SamplingBatch


class NativeSampler(Sampler):
    """A batch in which a row has top-k, top-p or min-p is sampled on torch."""

    def __init__(self, library: ctypes.CDLL, table: RequestTable, vocab_size: int) -> None:
        super().__init__(table, vocab_size)
        self._tokens, self._lengths = table.tokens.numpy(), table.length.numpy()  # the same memory
        self._most_likely, self._draw_token = library.most_likely_token, library.draw_token
        self._most_likely.restype = ctypes.c_int32
        self._most_likely.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        self._draw_token.restype = ctypes.c_int32
        self._draw_token.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_uint32]

    def draw(self, logits: Tensor, batch: SamplingBatch, device_rows: Tensor) -> Tensor:
        if batch.cuts:
            return super().draw(logits, batch, device_rows)
        logits = logits.float().contiguous()
        size, params = self._vocab_size, [request.params for request in batch.requests]
        rows = range(logits.data_ptr(), logits.data_ptr() + logits.nbytes, 4 * size)  # their addresses
        if all(p.greedy for p in params):
            found = [self._most_likely(row, size) for row in rows]
        else:
            seeds = torch.tensor([request.seed for request in batch.requests])
            keys = noise_keys(seeds, self._table.length[device_rows].long()).tolist()
            found = [
                self._most_likely(row, size) if p.greedy else self._draw_token(row, size, p.temperature, key)
                for row, p, key in zip(rows, params, keys, strict=True)
            ]
        at = self._lengths[batch.host_rows]
        self._tokens[batch.host_rows, at] = found
        self._lengths[batch.host_rows] = at + 1
        return torch.tensor(found)
