"""What a decoder layer is made of, stated once: its weights as checkpoints name them, and the state it keeps. No torch.

Everything that depends on a layer's shape is derived from these statements: where checkpoint tensors go, how ranks
divide them, the number of parameters, the bytes of weights and KV cache, and what a step has to read and compute.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple

from nanovllm.state import DTYPE_BYTES, PagedState

if TYPE_CHECKING:
    from nanovllm.layers.part_spec import MixerSpec, PartSpec
    from nanovllm.layers.rope_spec import RopeScaling

Activation = Literal["silu", "gelu"]  # of gate, times up; gate's rows come first in the weight. GELU with tanh
FP8_SCALE_BYTES = 2  # one 16-bit scale for a token's key, or value, in one head


class Span(NamedTuple):
    """The part of a dimension that one rank holds."""

    start: int
    size: int
    held: int  # elements kept in memory; more than `size` where the last ranks' parts are padded

    @property
    def slice(self) -> slice:
        return slice(self.start, self.start + self.size)


@dataclass(frozen=True)
class Dim:
    """One dimension of a weight. Tensor parallel ranks divide it in whole units, such as attention heads."""

    count: int  # units
    unit: int = 1  # elements of a unit
    divided: str | None = None  # what errors call the units; None = every rank holds the whole dimension
    repeats: bool = False  # with fewer units than ranks, several ranks hold the same unit
    pads: bool = False  # units need not divide evenly; the last ranks' parts are padded
    order: tuple[int, ...] = ()  # where checkpoints have a unit's element i; () = at i

    @property
    def size(self) -> int:
        return self.count * self.unit

    def part(self, rank: int, num_ranks: int) -> Span:
        """The part of rank `rank`; ConfigError where the units cannot be divided like that."""
        if self.divided is None or num_ranks == 1:
            return Span(0, self.size, self.size)
        from nanovllm.layers.division import divide

        return Span(*divide(self, rank, num_ranks))


@dataclass(frozen=True)
class TensorPart:
    """One checkpoint tensor's place in a rank's shard of a weight."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor in the checkpoint
    index: tuple[int | slice, ...]  # where it goes in the shard
    part: tuple[slice, ...]  # what of it this rank reads; () = all
    order: tuple[int, ...] = ()  # where the checkpoint has row i of the whole tensor; () = at i


@dataclass(frozen=True)
class Weight:
    """One parameter of a layer: checkpoint tensors `names`, stored apart and held as one along the first dimension."""

    names: tuple[str, ...]
    rows: tuple[Dim, ...]  # the first dimension of each
    columns: Dim | None = None  # the second; None = vectors
    num_experts: int = 0  # above 0: one such weight per expert, "{}" in the names stands for its number
    num_active: int = 0  # of the experts, for each token
    packable: bool = False  # may be kept in another weight format than the model's dtype
    on_first_rank: bool = False  # held by tensor parallel rank 0 alone
    offset: float | None = None  # added to what checkpoints hold; the sum is float32. None = in the model's dtype

    @property
    def num_parameters(self) -> int:
        size = sum(rows.size for rows in self.rows) * (1 if self.columns is None else self.columns.size)
        return size * max(self.num_experts, 1)

    def shard_shape(self, rank: int, num_ranks: int) -> tuple[int, ...]:
        """[experts,] rows [, columns] that this rank holds in memory."""
        shape = [sum(rows.part(rank, num_ranks).held for rows in self.rows)]
        if self.columns is not None:
            shape.append(self.columns.part(rank, num_ranks).held)
        return (self.num_experts, *shape) if self.num_experts else tuple(shape)

    def parts(self, rank: int, num_ranks: int) -> Iterator[TensorPart]:
        """Where each checkpoint tensor goes in this rank's shard."""
        columns = None if self.columns is None else self.columns.part(rank, num_ranks)
        first = 0
        for name, dim in zip(self.names, self.rows, strict=True):
            rows = dim.part(rank, num_ranks)
            shape: tuple[int, ...] = (dim.size,)
            part: tuple[slice, ...] = () if rows.size == dim.size else (rows.slice,)
            if self.columns is not None and columns is not None:
                shape = (dim.size, self.columns.size)
                if columns.size != self.columns.size:
                    part = (part[0] if part else slice(None), columns.slice)
            here = slice(first, first + rows.size)
            first += rows.held
            if not self.num_experts:
                yield TensorPart(name, shape, (here,), part)
            for expert in range(self.num_experts):
                yield TensorPart(name.format(expert), shape, (expert, here), part)


def linear_weights(
    names: Sequence[str], outputs: Sequence[Dim], inputs: Dim, *, bias: bool = False, prefix: str = ""
) -> dict[str, Weight]:
    """The "weight" and, with `bias`, the "bias" of a linear that checkpoints store as the modules `names`. `prefix`: of
    "weight" and "bias", for a part of a layer with several linears."""
    rows = tuple(outputs)
    found = {f"{prefix}weight": Weight(tuple(f"{name}.weight" for name in names), rows, inputs, packable=True)}
    if bias:
        # with divided inputs the ranks' results are summed, and the bias must be added once
        once = inputs.divided is not None
        found[f"{prefix}bias"] = Weight(tuple(f"{name}.bias" for name in names), rows, on_first_rank=once)
    return found


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding."""

    theta: float
    scaling: "RopeScaling | None" = None  # of the frequencies, in a model whose context was extended
    rotated_dim: int | None = None  # numbers of a head that are rotated, the first ones; None = all


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec
    window: int | None = None  # positions a token attends to, itself included; None = all
    scale: float | None = None  # of the scores before the softmax; None = head_dim ** -0.5
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm_eps: float | None = None  # None = queries and keys are not normalized
    qk_norm_offset: float | None = None  # see Weight

    @property
    def score_scale(self) -> float:
        return self.head_dim**-0.5 if self.scale is None else self.scale

    def on_ranks(self, num_ranks: int) -> "AttentionSpec":
        """With the heads that each of `num_ranks` tensor parallel ranks computes."""
        return replace(self, num_heads=self.num_heads // num_ranks, num_kv_heads=max(self.num_kv_heads // num_ranks, 1))

    def weights(self) -> dict[str, Weight]:
        queries = Dim(self.num_heads, self.head_dim, "attention heads")
        keys = Dim(self.num_kv_heads, self.head_dim, "KV heads", repeats=True)
        hidden = Dim(self.hidden_size)
        names, outputs = ("q_proj", "k_proj", "v_proj"), (queries, keys, keys)
        found = linear_weights(names, outputs, hidden, bias=self.qkv_bias, prefix="qkv_")
        found |= linear_weights(("o_proj",), (hidden,), queries, bias=self.o_bias, prefix="o_")
        if self.qk_norm_eps is not None:
            norm = norm_weight(self.head_dim, self.qk_norm_offset)
            found |= {name: replace(norm, names=(f"{name}.weight",)) for name in ("q_norm", "k_norm")}
        return found

    def state(self, dtype: str, num_ranks: int = 1) -> PagedState:
        heads = self.on_ranks(num_ranks).num_kv_heads
        head_bytes = self.head_dim * DTYPE_BYTES[dtype]
        if dtype == "float8_e4m3fn":
            head_bytes += FP8_SCALE_BYTES
        return PagedState(bytes_per_token=2 * heads * head_bytes, window=self.window)


@dataclass(frozen=True, kw_only=True)
class MlpSpec:
    """down(activation(gate(x)) * up(x))"""

    hidden_size: int
    intermediate_size: int
    bias: bool = False
    activation: Activation = "silu"

    def weights(self) -> dict[str, Weight]:
        hidden, columns = Dim(self.hidden_size), Dim(self.intermediate_size, divided="columns of the MLP")
        names, outputs = ("gate_proj", "up_proj"), (columns, columns)
        found = linear_weights(names, outputs, hidden, bias=self.bias, prefix="gate_up_")
        return found | linear_weights(("down_proj",), (hidden,), columns, bias=self.bias, prefix="down_")


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One decoder layer: x + mixer(norm(x)), then x + feed_forward(norm(x))."""

    hidden_size: int
    mixer: "MixerSpec"
    feed_forward: "PartSpec"
    norm_eps: float
    norm_offset: float | None = None  # see Weight
    mixer_name: str = "self_attn"  # in checkpoints
    feed_forward_name: str = "mlp"
    norm_names: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Every parameter with its prefix in checkpoints."""
        for name in self.norm_names:
            yield f"{name}.", norm_weight(self.hidden_size, self.norm_offset)
        for name, part in ((self.mixer_name, self.mixer), (self.feed_forward_name, self.feed_forward)):
            yield from ((f"{name}.", weight) for weight in part.weights().values())


def norm_weight(size: int, offset: float | None = None) -> Weight:
    return Weight(("weight",), (Dim(size),), offset=offset)
