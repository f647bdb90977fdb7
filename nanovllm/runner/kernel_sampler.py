"""Sampling with our own kernels, which read the request table."""

import torch
from torch import Tensor

from nanovllm.kernels.sampling.sample import sample
from nanovllm.kernels.sampling.thresholds import cut_thresholds
from nanovllm.runner.kernel_table import KernelTable
from nanovllm.runner.sampling import SamplingBatch


class KernelSampler:
    """The same as `Sampler` with kernels; nothing here waits for the device.

    Each row samples one token. Steps that verify proposed tokens use `Sampler`.
    """

    def __init__(self, table: KernelTable, max_num_seqs: int, device: torch.device, *, pdl: bool) -> None:
        self._table, self._columns = table, table.sampling
        self._pdl = pdl
        self._out = torch.zeros(max_num_seqs, dtype=torch.int32, device=device)
        self._thresholds = torch.empty(max_num_seqs, dtype=torch.float32, device=device)
        self._scratch = torch.zeros(max_num_seqs, 2, dtype=torch.int64, device=device)

    def draw(self, logits: Tensor, batch: SamplingBatch, device_rows: Tensor) -> Tensor:
        return self.launch(logits, device_rows, cuts=batch.cuts)

    def launch(self, logits: Tensor, rows: Tensor, *, cuts: bool) -> Tensor:
        """[n, vocab] logits of [n] rows, 0 = padding -> [n] tokens, valid until the next launch."""
        table, columns, n, thresholds = self._table, self._columns, len(rows), None
        if cuts:
            thresholds = self._thresholds[:n]
            cut_thresholds(
                logits,
                rows=rows,
                temperature=columns.temperature,
                top_k=columns.top_k,
                top_p=columns.top_p,
                min_p=columns.min_p,
                out=thresholds,
                pdl=self._pdl,
            )
        sample(
            logits,
            rows=rows,
            tokens=table.tokens,
            length=table.length,
            temperature=columns.temperature,
            seed_low=columns.seed_low,
            seed_high=columns.seed_high,
            thresholds=thresholds,
            out=self._out,
            scratch=self._scratch,
            pdl=self._pdl,
        )
        return self._out[:n]
