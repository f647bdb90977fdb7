"""How much memory the state of sequences gets: blocks for each paged group, and one state per row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.config import Config
from nanovllm.models.shard import Shard
from nanovllm.state import BlockGroup, CacheLayout, LayerState, PagedState, state_groups

if TYPE_CHECKING:
    from nanovllm.attention.interface import AttentionBackend


@dataclass(frozen=True, kw_only=True)
class CacheSize:
    num_blocks: int  # of the first paged group; the layout says how many the others have
    layout: CacheLayout
    block_bytes: tuple[int, ...]  # of a block of each paged group, on this rank
    row_bytes: int  # of all rows' states and their checkpoints, on this rank
    reason: str  # where the number of blocks comes from, for people

    @property
    def groups(self) -> tuple[BlockGroup, ...]:
        return self.layout.groups(self.num_blocks)


def size_kv_cache(config: Config, shard: Shard, *, max_model_len: int, dtype: torch.dtype) -> CacheSize:
    """The sizes on one rank, which holds `shard`, with as many blocks as the option num_kv_cache_blocks says.

    `dtype`: of the KV cache. If the option is -1, `memory_budget.fit` finds how many blocks there can be.
    """
    layout = config.cache_layout(windows=shard.model.windows, max_model_len=max_model_len)
    own = state_groups(shard.layer_states(str(dtype).removeprefix("torch.")))
    own_bytes = {group.window: group.bytes_per_block(layout.block_size) for group in own if group.paged}
    row_bytes = sum(group.num_bytes for group in own if not group.paged)
    if row_bytes:
        from nanovllm.row_state import num_states

        row_bytes *= num_states(config)
    return CacheSize(
        num_blocks=config.num_kv_cache_blocks,
        layout=layout,
        block_bytes=tuple(own_bytes.get(window, 0) for window in layout.windows),
        row_bytes=row_bytes,
        reason=f"num_kv_cache_blocks={config.num_kv_cache_blocks}",
    )


def make_states(
    states: Sequence[LayerState], backend: "AttentionBackend", num_blocks: Mapping[int | None, int], rows: Sequence[Any]
) -> list[Any]:
    """What each layer reads: a cache of the backend, one of `rows`, or an earlier layer's. `num_blocks`: by window."""
    paged, per_row = iter(backend.make_cache(num_blocks)), iter(rows)
    made: list[Any] = []
    for state in states:
        if isinstance(state, PagedState) and state.source:
            made.append(made[-state.source])
        else:
            made.append(next(paged if isinstance(state, PagedState) else per_row))
    return made
