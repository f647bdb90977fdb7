"""Draws from the whole vocabulary in C (src/sampling.c): one pass, and noise only for tokens that could win."""

import ctypes

import torch
from torch import Tensor

from nanovllm.layers.noise import noise_keys
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.sampling import Sampler, SamplingBatch


class NativeSampler(Sampler):
    """Rows with top-k, top-p or min-p are sampled on torch, and so is a batch that is greedy."""

    def __init__(self, library: ctypes.CDLL, table: RequestTable, vocab_size: int) -> None:
        super().__init__(table, vocab_size)
        self._draw_token = library.draw_token
        self._draw_token.restype = ctypes.c_int32
        self._draw_token.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_float, ctypes.c_uint32]

    def draw(self, logits: Tensor, batch: SamplingBatch, device_rows: Tensor) -> Tensor:
        params = [request.params for request in batch.requests]
        if batch.cuts or any(p.greedy for p in params):
            return super().draw(logits, batch, device_rows)
        logits = logits.float().contiguous()
        seeds = torch.tensor([request.seed for request in batch.requests])
        keys = noise_keys(seeds, self._table.length[device_rows].long()).tolist()
        size = self._vocab_size
        tokens = torch.tensor(
            [
                self._draw_token(row.data_ptr(), size, p.temperature, key)
                for row, p, key in zip(logits, params, keys, strict=True)
            ]
        )
        self._table.append(device_rows, tokens, None)
        return tokens
