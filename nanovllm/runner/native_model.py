"""A decoder whose step is one call of C (src/step.c). It stands in for `models.decoder.Decoder` in a runner."""

import ctypes
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm.attention.backend import BatchGeometry, CacheShape, LayerAttention, LayerCache
from nanovllm.attention.sdpa import zeros
from nanovllm.checkpoint.stored import Slot
from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.layers.query_scale import query_factors
from nanovllm.layers.query_scale_spec import ScaledQueryAttentionSpec
from nanovllm.layers.short_conv_spec import ShortConvSpec
from nanovllm.layers.spec import AttentionSpec, MlpSpec, RopeSpec, Weight
from nanovllm.layers.step import Step
from nanovllm.layers.wide_norm_spec import WideNormAttentionSpec
from nanovllm.models.shard import Shard
from nanovllm.native.build import declare
from nanovllm.native.support import norms_of
from nanovllm.native.weights import DENSE, PACKING, Matrix, NativeWeight, named_parts, native_slots, pointer
from nanovllm.weights.forms import Form

PARTS = (
    *("embedding", "norms", "q, k, v", "rotation", "attention", "b, c, h", "convolution", "output"),
    *("routing", "gate, up", "down", "head"),
)
POINTER, INT, FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class Layer(ctypes.Structure):
    _fields_ = (
        *((name, Matrix) for name in ("q", "k", "v", "o", "gate", "up", "down", "router")),
        ("experts", POINTER),
        *((name, POINTER) for name in ("input_norm", "ffn_norm", "after_attention", "after_ffn", "q_norm", "k_norm")),
        *((name, POINTER) for name in ("rotary", "keys", "values", "filters", "filter_bias", "states")),
        *((name, INT) for name in ("window", "group", "state_stride")),
    )


class Model(ctypes.Structure):
    _fields_ = (
        *((name, INT) for name in ("num_layers", "hidden", "intermediate", "num_heads", "num_kv_heads")),
        *(
            (name, INT)
            for name in ("head_dim", "block_size", "num_experts", "experts_per_token", "kv_type", "normalize_shares")
        ),
        *((name, INT) for name in ("num_parts", "uses_gelu", "norms_all_heads", "conv_taps")),
        *((name, FLOAT) for name in ("eps", "head_norm_eps", "last_norm_eps", "scale", "embedding_scale")),
        ("query_scales", POINTER),
        ("layers", POINTER),
        ("embedding", Matrix),
        ("head", Matrix),
        ("last_norm", POINTER),
    )


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

    def __init__(self, shape: CacheShape) -> None:
        self.shape, self.block_size = shape, shape.block_size

    def make_cache(self, num_blocks: Mapping[int | None, int]) -> list[LayerCache]:
        s = self.shape
        sizes = [(2, num_blocks[window], s.num_kv_heads, s.block_size, s.head_dim) for window in s.windows]
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
        makes: Callable[[Weight], Form | None],  # what a weight is rounded to while loading
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
        self._layers = (Layer * self.spec.num_layers)()
        self._experts: list[ctypes.Array[Matrix]] = []  # of each layer
        self._windows = list(self.spec.windows)  # of the groups
        self._bound: list[Any] = []  # the states whose addresses the layers have
        self._computed: tuple[Tensor, Tensor] | None = None  # hidden states and logits of the last step
        self.close: Callable[[], Any] = lambda: None

    # --- weights ------------------------------------------------------------------------------------------------------

    def slots(self) -> dict[str, Slot]:
        """Where every tensor of a checkpoint goes, by its Hugging Face name."""

        def target_of(name: str, weight: Weight) -> NativeWeight:
            self._weights[name] = NativeWeight(self._library, packs=self._packs, makes=self._makes(weight))
            return self._weights[name]

        return native_slots(self.spec, target_of)

    def finish_loading(self) -> None:
        """Describe the weights to C, and start its threads."""
        spec, first = self.spec, self.spec.layers[0]
        mixer = next(layer.mixer for layer in spec.layers if isinstance(layer.mixer, AttentionSpec))
        convolution = next((layer.mixer for layer in spec.layers if isinstance(layer.mixer, ShortConvSpec)), None)
        head_norm_eps = mixer.wide_norm_eps if isinstance(mixer, WideNormAttentionSpec) else mixer.qk_norm_eps
        if isinstance(mixer, ScaledQueryAttentionSpec):
            self._query_scales = query_factors(mixer, torch.arange(self._most_positions) // mixer.original_length)
        feed_forwards = cast(list[MlpSpec | MoeSpec], [layer.feed_forward for layer in spec.layers])
        experts = next((each for each in feed_forwards if isinstance(each, MoeSpec)), None)
        for index in range(spec.num_layers):
            self._describe_layer(index)
        embedding = self._weights["model.embed_tokens.weight"]
        model = Model(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            intermediate=max(each.intermediate_size for each in feed_forwards),
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            block_size=self._block_size,
            num_experts=experts.num_experts if experts else 0,
            experts_per_token=experts.num_experts_per_token if experts else 0,
            kv_type=DENSE[self._kv_dtype],
            normalize_shares=bool(experts and experts.norm_topk_prob),
            num_parts=1 if self._rounds_inputs else 3,
            uses_gelu=feed_forwards[0].activation == "gelu",
            norms_all_heads=isinstance(mixer, WideNormAttentionSpec),
            conv_taps=convolution.kernel_size if convolution else 0,
            eps=first.norm_eps,
            head_norm_eps=head_norm_eps or 0.0,
            last_norm_eps=spec.norm_eps,
            scale=mixer.score_scale,
            embedding_scale=self._embedding_scale(),
            query_scales=pointer(self._query_scales) if len(self._query_scales) else None,
            layers=ctypes.addressof(self._layers),
            embedding=embedding.matrix(),
            head=(embedding if spec.tie_word_embeddings else self._weights["lm_head.weight"]).matrix(),
            last_norm=pointer(self._weights["model.norm.weight"].data),
        )
        self._engine = self._library.engine_create(model, self._num_threads)
        if not self._engine:
            raise MemoryError("no memory for the activations of the native step")
        self.close = weakref.finalize(self, self._library.engine_destroy, self._engine)

    def _embedding_scale(self) -> float:
        """The factor of embedded tokens; transformers rounds it to the dtype in which it computes."""
        scales = self.spec.scales
        if scales is None:
            return 1.0
        dtype = torch.bfloat16 if self._rounds_inputs and scales.rounds_embedding else torch.float32
        return float(scales.embedded(torch.ones((), dtype=dtype)))

    def _describe_layer(self, index: int) -> None:
        layer, prefix = self._layers[index], f"model.layers.{index}"
        spec = self.spec.layers[index]
        mixer, feed_forward = f"{prefix}.{spec.mixer_name}.", f"{prefix}.{spec.feed_forward_name}."
        norms = {field: f"{prefix}.{name}.weight" for field, name in norms_of(spec).items()}
        if isinstance(spec.mixer, ShortConvSpec):
            self._describe_convolution(layer, mixer, spec.mixer.weights())
        else:
            assert isinstance(spec.mixer, AttentionSpec)
            layer.rotary = pointer(self._rotary[spec.mixer.rope])
            layer.window, layer.group = spec.mixer.window or 0, self._windows.index(spec.mixer.window)
            attention = spec.mixer.weights()
            self._describe(layer, mixer, attention, "qkv_", ("q", "k", "v"))
            self._describe(layer, mixer, attention, "o_", ("o",))
            norms |= {field: mixer + attention[field].names[0] for field in ("q_norm", "k_norm") if field in attention}
        weights = cast(MlpSpec | MoeSpec, spec.feed_forward).weights()
        if isinstance(spec.feed_forward, MoeSpec):
            layer.router = self._weights[feed_forward + weights["router"].names[0]].matrix()
            layer.experts = self._describe_experts(f"{feed_forward}experts", spec.feed_forward.num_experts)
        else:
            self._describe(layer, feed_forward, weights, "gate_up_", ("gate", "up"))
            self._describe(layer, feed_forward, weights, "down_", ("down",))
        for field, name in norms.items():
            setattr(layer, field, pointer(self._weights[name].data))

    def _describe_convolution(self, layer: Layer, prefix: str, weights: Mapping[str, Weight]) -> None:
        self._describe(layer, prefix, weights, "in_", ("q", "k", "v"))
        self._describe(layer, prefix, weights, "out_", ("o",))
        filters = self._weights[prefix + weights["conv"].names[0]]
        filters.data = filters.data[:, 0].T.contiguous()  # [channels, 1, taps] -> [taps, channels]
        layer.filters = pointer(filters.data)
        if "conv_bias" in weights:
            layer.filter_bias = pointer(self._weights[prefix + weights["conv_bias"].names[0]].data)

    def _describe(
        self, layer: Layer, prefix: str, weights: Mapping[str, Weight], kind: str, fields: Sequence[str]
    ) -> None:
        """The matrices of a linear, and their biases."""
        names = [name for name, _ in named_parts(prefix, weights[f"{kind}weight"])]
        biases: Sequence[str | None] = (None,) * len(names)
        if f"{kind}bias" in weights:
            biases = [name for name, _ in named_parts(prefix, weights[f"{kind}bias"])]
        for field, name, bias in zip(fields, names, biases, strict=True):
            setattr(layer, field, self._weights[name].matrix(None if bias is None else self._weights[bias]))

    def _describe_experts(self, prefix: str, num_experts: int) -> int:
        """The address of their matrices."""
        names = [f"{prefix}.{n}.{name}_proj.weight" for n in range(num_experts) for name in ("gate", "up", "down")]
        experts = (Matrix * len(names))(*(self._weights[name].matrix() for name in names))
        self._experts.append(experts)
        return ctypes.addressof(experts)

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
        for layer, state in zip(self._layers, states, strict=True):
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
