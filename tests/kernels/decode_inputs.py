"""Inputs for the decode attention tests: sequences in a paged cache that is NaN wherever nothing may be read."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanovllm.kernels.attention.decode import paged_decode_reference
from nanovllm.kernels.attention.decode_workspace import DecodeWorkspace
from tests.kernels.support import DEVICE

NUM_POSITIONS = 4096 if DEVICE == "cuda" else 256
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
UNTOUCHED = 5.0
NO_BLOCK = 10**6


@dataclass(frozen=True)
class Sequences:
    """The shape of one call; `lengths` include the newest token, 0 is padding."""

    lengths: tuple[int, ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float16
    cache_dtype: torch.dtype | None = None
    norm: bool = True
    window: int | None = None
    sinks: bool = False
    reads_ahead: bool = False  # the kernel reads past a table's end, which then holds an unused block

    def workspace(self, num_programs: int) -> DecodeWorkspace:
        return DecodeWorkspace(
            max_batch=len(self.lengths) + 1,
            max_programs=num_programs,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            device=DEVICE,
        )


class Inputs:
    def __init__(self, case: Sequences, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(case.dtype).to(DEVICE)

        cache_dtype = case.cache_dtype or case.dtype
        needed = [-(-length // case.block_size) for length in case.lengths]
        num_blocks = sum(needed) + 2
        nobodys, *numbers = random.Random(seed).sample(range(1, num_blocks), num_blocks - 1)
        blocks = torch.zeros(len(needed) + 1, max(needed) + 3, dtype=torch.int32)
        blocks[1:] = nobodys if case.reads_ahead else NO_BLOCK
        cache = torch.full((2, num_blocks, case.kv_heads, case.block_size, case.head_dim), float("nan"))
        scales = torch.full(cache.shape[:-1], float("nan"))
        for row, (length, count) in enumerate(zip(case.lengths, needed, strict=True), start=1):
            for i in range(count):
                block = blocks[row, i] = numbers.pop()
                filled = max(0, min(case.block_size, length - 1 - i * case.block_size))
                cache[:, block, :, :filled] = torch.randn(2, case.kv_heads, filled, case.head_dim, generator=generator)
                scales[:, block, :, :filled] = torch.rand(2, case.kv_heads, filled, generator=generator) + 0.5
        self.cache = cache.to(cache_dtype).to(DEVICE)
        self.scales = scales.bfloat16().to(DEVICE) if cache_dtype == torch.float8_e4m3fn else None
        self.blocks = blocks.to(DEVICE)
        rows = [i + 1 if length else 0 for i, length in enumerate(case.lengths)]
        self.rows = torch.tensor(rows, dtype=torch.int32, device=DEVICE)
        self.positions = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE) - 1
        self.qkv = normal(len(needed), case.heads + 2 * case.kv_heads, case.head_dim) * 2
        self.q_norm = 1 + normal(case.head_dim) / 4 if case.norm else None
        self.k_norm = 1 + normal(case.head_dim) / 4 if case.norm else None
        angles = torch.rand(NUM_POSITIONS, case.head_dim // 2, generator=generator) * 6.3
        self.cos_sin = torch.cat([angles.cos(), angles.sin()], dim=-1).to(DEVICE)
        self.sinks = normal(case.heads) * 3 if case.sinks else None
        self.scale = 1.25 * case.head_dim**-0.5  # not the usual one

    def arguments(self) -> dict[str, Any]:
        """The arguments that all attention functions take."""
        names = ("positions", "q_norm", "k_norm", "cos_sin", "sinks")
        return {name: getattr(self, name) for name in names} | {"eps": 1e-6, "scale": self.scale}

    def newest_slots(self, case: Sequences) -> Tensor:  # [2, num_blocks, kv_heads, block_size]
        found = torch.zeros(self.cache.shape[:-1], dtype=torch.bool)
        for row, length in enumerate(case.lengths, start=1):
            if length:
                block = int(self.blocks[row, (length - 1) // case.block_size])
                found[:, block, :, (length - 1) % case.block_size] = True
        return found.to(DEVICE)


def check_decode(case: Sequences, seed: int, workspace: DecodeWorkspace, run: Callable[[Inputs, Tensor], None]) -> None:
    """Compare what `run` returns, [batch, heads * head_dim], and writes to the cache with the reference."""
    inputs, before, reference = Inputs(case, seed), Inputs(case, seed), Inputs(case, seed)
    expected = paged_decode_reference(
        inputs.qkv,
        reference.cache,
        reference.scales,
        rows=inputs.rows,
        blocks=inputs.blocks,
        window=case.window,
        **inputs.arguments(),
    )
    expected[inputs.positions < 0] = UNTOUCHED
    out = torch.full_like(expected, UNTOUCHED)
    run(inputs, out)

    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert not workspace.arrived.any()
    # The new slots are equal up to the rounding of the norm; nothing else may change.
    written = inputs.newest_slots(case)
    assert torch.equal(_bits(inputs.cache)[~written], _bits(before.cache)[~written])
    rounding = tolerance if inputs.scales is None else 0.07
    new, new_expected = (_dequantized(each)[written] for each in (inputs, reference))
    torch.testing.assert_close(new, new_expected, rtol=rounding, atol=tolerance)
    if inputs.scales is not None and before.scales is not None and reference.scales is not None:
        assert torch.equal(_bits(inputs.scales)[~written], _bits(before.scales)[~written])
        torch.testing.assert_close(inputs.scales[written], reference.scales[written], rtol=1e-2, atol=0)


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def _dequantized(inputs: Inputs) -> Tensor:
    return inputs.cache.float() if inputs.scales is None else inputs.cache.float() * inputs.scales.float()[..., None]
