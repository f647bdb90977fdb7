"""A decoder whose step is one call of C (src/step.c). It stands in for `models.decoder.Decoder` in a runner."""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import BatchGeometry, CacheShape, LayerAttention, LayerCache
from nanovllm.attention.sdpa import zeros
from nanovllm.checkpoint.stored import Slot
from nanovllm.layers.query_scale import query_factors
from nanovllm.layers.query_scale_spec import ScaledQueryAttentionSpec
from nanovllm.layers.spec import AttentionSpec, RopeSpec, Weight
from nanovllm.layers.step import Step
from nanovllm.models.scales import Scales
from nanovllm.models.shard import Shard
from nanovllm.native.build import declare
from nanovllm.native.support import Makes, attention_specs
from nanovllm.native.weights import DENSE, PACKING, NativeWeight, native_slots, pointer
from nanovllm.runner.native_layers import Model, NativeLayers

PARTS = (
    *("embedding", "norms", "q, k, v", "rotation", "attention", "inputs of states", "states", "output"),
    *("routing", "gate, up", "down", "head"),
)
POINTER, INT = ctypes.c_void_p, ctypes.c_int32


class StepArguments(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("num_tokens", "num_wanted", "num_sequences", "table_stride")),
        *((name, POINTER) for name in ("tokens", "positions", "sequences", "tables", "rows", "wanted")),
        *((name, POINTER) for name in ("hidden", "logits")),
    )


SIGNATURES = PACKING | {  # of the functions in the library
    "engine_create": (POINTER, [ctypes.POINTER(Model), ctypes.c_int]),
    "engine_destroy": (None, [POINTER]),
    "engine_step": (None, [POINTER, ctypes.POINTER(StepArguments)]),
    "engine_logits": (None, [POINTER, POINTER, ctypes.c_int, POINTER]),
    "engine_seconds": (None, [POINTER, POINTER]),
}


class NativeBackend:
    """Makes the KV cache; the attention itself is part of the step."""

    plans_on_device = False

    def __init__(self, shape: CacheShape, layers: Sequence[AttentionSpec]) -> None:
        """`shape`: that of the first layer."""
        self.shape, self.block_size, self._layers = shape, shape.block_size, layers

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        s = self.shape
        sizes = [(2, num_blocks[x.window], x.num_kv_heads, s.block_size, x.head_dim) for x in self._layers]
        return [LayerCache(zeros(size, s.cache_dtype, s.device)) for size in sizes]

    def prepare(self, geometry: BatchGeometry, upload: Callable[[np.ndarray], Tensor]) -> BatchGeometry:
        return geometry

    def forward(self, qkv: Tensor, layer: LayerAttention, cache: LayerCache, step: Any) -> Tensor:
        raise NotImplementedError("attention is a part of the native step")


class NativeModel:
    def __init__(
        self,
        shard: Shard,  # all of the model
        library: ctypes.CDLL,
        *,
        rotary: Mapping[RopeSpec, Tensor],  # [max_position, head_dim] float32: cosines, then sines
        block_size: int,
        num_threads: int,
        packs: bool,  # weights that the file holds packed stay packed
        makes: Makes,  # what a weight is rounded to while loading
        kv_dtype: torch.dtype,
        rounds_inputs: bool,  # of dense products to bfloat16, if the CPU multiplies such numbers
    ) -> None:
        self.shard, self.spec = shard, shard.model
        self._library, self._num_threads = declare(library, SIGNATURES), num_threads
        self._packs, self._makes, self._kv_dtype, self._rounds_inputs = packs, makes, kv_dtype, rounds_inputs
        self._rotary, self._block_size = rotary, block_size
        self._most_positions = min(map(len, rotary.values()))
        self._query_scales = torch.empty(0)  # of each position, or none
        self._weights: dict[str, NativeWeight] = {}  # by name in checkpoints
        self._layers: NativeLayers
        self._windows = list(self.spec.windows)  # of the groups
        self._bound: list[Any] = []  # the states whose addresses the layers have
        self._computed: tuple[Tensor, Tensor] | None = None  # hidden states and logits of the last step
        self.close: Callable[[], Any] = lambda: None

    # --- weights ------------------------------------------------------------------------------------------------------

    def slots(self) -> dict[str, Slot]:
        """Where every tensor of a checkpoint goes, by its Hugging Face name."""

        def target_of(prefix: str, name: str, weight: Weight) -> NativeWeight:
            self._weights[name] = NativeWeight(self._library, packs=self._packs, makes=self._makes(prefix, weight))
            return self._weights[name]

        return native_slots(self.spec, target_of)

    def finish_loading(self) -> None:
        """Describe the weights to C, and start its threads."""
        spec = self.spec
        self._layers = NativeLayers(spec, self._weights, self._rotary)
        embedding = self._weights["model.embed_tokens.weight"]
        model = Model(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            block_size=self._block_size,
            kv_type=DENSE[self._kv_dtype],
            num_parts=1 if self._rounds_inputs else 3,
            last_norm_eps=spec.norm_eps,
            embedding_scale=self._factor(spec.scales or Scales()),
            own_scale=self._factor(spec.per_layer.scales) if spec.per_layer is not None else 1.0,
            query_scales=self._scales_of_queries(),
            layers=ctypes.addressof(self._layers.all),
            embedding=embedding.matrix(),
            head=(embedding if spec.tie_word_embeddings else self._weights["lm_head.weight"]).matrix(),
            last_norm=pointer(self._weights["model.norm.weight"].data),
            **self._layers.sizes(),
        )
        self._engine = self._library.engine_create(model, self._num_threads)
        if not self._engine:
            raise MemoryError("no memory for the activations of the native step")
        self.close = weakref.finalize(self, self._library.engine_destroy, self._engine)

    def _scales_of_queries(self) -> ctypes.c_void_p | None:
        mixer = attention_specs(self.spec)[0]
        if not isinstance(mixer, ScaledQueryAttentionSpec):
            return None
        self._query_scales = query_factors(mixer, torch.arange(self._most_positions) // mixer.original_length)
        return pointer(self._query_scales)

    def _factor(self, scales: Scales) -> float:
        """Of embedded tokens; transformers rounds it to the dtype in which it computes."""
        dtype = torch.bfloat16 if self._rounds_inputs and scales.rounds_embedding else torch.float32
        return float(scales.embedded(torch.ones((), dtype=dtype)))

    # --- computing ----------------------------------------------------------------------------------------------------

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """The step embeds them itself."""
        return token_ids

    def norm(self, hidden: Tensor) -> Tensor:
        """The norm before the head."""
        return F.rms_norm(hidden, hidden.shape[-1:], self._weights["model.norm.weight"].data, self.spec.norm_eps)

    def __call__(self, x: Tensor, states: list[Any], step: Step, wanted: Tensor | None = None) -> Tensor:
        """[num_tokens] token ids through all layers; [num_tokens, hidden], or with `wanted`, [n], those rows.

        In a step in which all rows that are kept are sampled, the same call computes their logits.
        """
        if self._bound is not states:
            self._bind(states)
        geometry: BatchGeometry = step.attention
        tokens = np.ascontiguousarray(x.numpy(), dtype=np.int32)
        positions = np.ascontiguousarray(geometry.positions, dtype=np.int32)
        sequences = np.ascontiguousarray(geometry.token_seqs, dtype=np.int32)
        tables = np.stack([geometry.block_tables[window] for window in self._windows]).astype(np.int32)
        rows = np.ascontiguousarray(geometry.rows, dtype=np.int32)
        if wanted is None:
            kept = np.arange(len(tokens), dtype=np.int32)
        else:
            kept = np.ascontiguousarray(wanted.numpy(), dtype=np.int32)
        self._check(tokens, positions, sequences, tables, rows, kept)
        hidden = torch.empty(len(kept), self.spec.hidden_size)
        samples_all = wanted is not None or geometry.num_decodes == len(tokens)
        logits = torch.empty(len(kept) if samples_all else 0, self.spec.vocab_size)
        arguments = StepArguments(
            num_tokens=len(tokens),
            num_wanted=len(kept),
            num_sequences=tables.shape[1],
            table_stride=tables.shape[2],
            tokens=tokens.ctypes.data,
            positions=positions.ctypes.data,
            sequences=sequences.ctypes.data,
            tables=tables.ctypes.data,
            rows=rows.ctypes.data,
            wanted=kept.ctypes.data,
            hidden=pointer(hidden),
            logits=pointer(logits) if samples_all else None,
        )
        self._library.engine_step(self._engine, arguments)
        self._computed = (hidden, self._scaled(logits)) if samples_all else None
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:  # [num_rows, hidden] -> [num_rows, vocab]
        if self._computed is not None and self._computed[0] is hidden:
            return self._computed[1]
        hidden = hidden.contiguous()
        logits = torch.empty(len(hidden), self.spec.vocab_size)
        self._library.engine_logits(self._engine, pointer(hidden), len(hidden), pointer(logits))
        return self._scaled(logits)

    def _scaled(self, logits: Tensor) -> Tensor:
        return logits if self.spec.scales is None else self.spec.scales.scaled_logits(logits)

    def seconds(self) -> dict[str, float]:
        """How long each part of the steps took since the last call."""
        found = (ctypes.c_double * len(PARTS))()
        self._library.engine_seconds(self._engine, found)
        return dict(zip(PARTS, found, strict=True))

    def _bind(self, states: list[Any]) -> None:
        """`states`: of attention a cache, of a convolution [rows, conv_taps - 1, hidden]."""
        self._bound, self._num_blocks, self._num_rows = states, {}, 0
        for layer, state in zip(self._layers.all, states, strict=True):
            if isinstance(state, LayerCache):
                layer.keys, layer.values = pointer(state.kv[0]), pointer(state.kv[1])
                self._num_blocks[layer.group] = state.kv.shape[1]
            else:
                layer.states, layer.state_stride = pointer(state), state.stride(0)
                self._num_rows = len(state)

    def _check(
        self,
        tokens: np.ndarray,
        positions: np.ndarray,
        sequences: np.ndarray,
        tables: np.ndarray,
        rows: np.ndarray,
        kept: np.ndarray,
    ) -> None:
        """Every index that C follows. All are the engine's own; one that is wrong must not become a wrong address."""
        most_positions = min(self._most_positions, tables.shape[2] * self._block_size)
        check_range("token id", tokens, self.spec.vocab_size)
        check_range("position", positions, most_positions)
        check_range("sequence", sequences, tables.shape[1])
        for group, num_blocks in self._num_blocks.items():
            check_range("block", tables[group], num_blocks)
        if self._num_rows:
            check_range("row", rows, self._num_rows)
        check_range("wanted token", kept, len(tokens))
        fit = len(tokens) == len(positions) == len(sequences) and len(rows) == tables.shape[1]
        if not fit or (len(kept) > 1 and (kept[1:] <= kept[:-1]).any()):
            raise IndexError("the arrays of a step do not fit together")


def check_range(what: str, values: np.ndarray, size: int) -> None:
    """`values`: int32."""
    if values.size and values.view(np.uint32).max() >= size:  # a negative number is a very large one
        raise IndexError(f"a {what} is outside of 0 to {size - 1}: {values.min()} to {values.max()}")
