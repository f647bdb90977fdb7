"""Layers whose checkpoints store weights in another way: several as one tensor, or rows in another order. No torch.

Attention rotates number i of a query or key together with number i + head_dim / 2, by an angle of 0 if they are not to
be rotated. Where a model rotates a part of each head, or neighbours, the rows of the weights that give queries and keys
are brought into this order when they are loaded. The scores do not depend on the order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from nanovllm.layers.refine import refine
from nanovllm.layers.spec import AttentionSpec, Dim, MlpSpec, TensorPart, Weight


class StoredWeight(Weight):
    """A weight of which several parts may be stored as one tensor, whose name is then that of each of them."""

    def parts(self, rank: int, num_ranks: int) -> Iterator[TensorPart]:
        begins = dict.fromkeys(self.names, 0)
        for dim, own in zip(self.rows, super().parts(rank, num_ranks), strict=True):
            begin = begins[own.name]
            begins[own.name] += dim.size
            together = [rows for name, rows in zip(self.names, self.rows, strict=True) if name == own.name]
            rows, *columns = own.part or (slice(None),)
            first, last, _ = rows.indices(dim.size)
            yield replace(
                own,
                shape=(sum(rows.size for rows in together), *own.shape[1:]),
                part=(slice(begin + first, begin + last), *columns),
                order=row_order(together),
            )


def row_order(dims: Sequence[Dim]) -> tuple[int, ...]:
    """Where a checkpoint has row i of a tensor in which these dimensions follow each other; () = at i."""
    if not any(dim.order for dim in dims):
        return ()
    order: list[int] = []
    for dim in dims:
        for _ in range(dim.count):
            begin = len(order)
            order += [begin + place for place in dim.order or range(dim.unit)]
    return tuple(order)


def head_order(head_dim: int, rotated: int, *, interleaved: bool) -> tuple[int, ...]:
    """Where checkpoints have number i of a query or key."""
    if interleaved:
        first, second = range(0, rotated, 2), range(1, rotated, 2)
    else:
        first, second = range(rotated // 2), range(rotated // 2, rotated)
    kept = range(rotated, head_dim)
    half = len(kept) // 2
    return (*first, *kept[:half], *second, *kept[half:])


def _as_one(weights: dict[str, Weight], prefix: str) -> dict[str, Weight]:
    """With the parts of a linear stored as one module `{prefix}proj`."""
    own = {kind: weights[kind] for kind in (f"{prefix}weight", f"{prefix}bias") if kind in weights}
    names = {kind: f"{prefix}proj.{kind.removeprefix(prefix)}" for kind in own}
    return weights | {
        kind: refine(StoredWeight, one, names=(names[kind],) * len(one.names)) for kind, one in own.items()
    }


@dataclass(frozen=True, kw_only=True)
class StoredAttentionSpec(AttentionSpec):
    as_one: bool = False  # checkpoints have one tensor `qkv_proj`
    interleaved: bool = False  # and the two numbers that are rotated together side by side, not in two halves

    def weights(self) -> dict[str, Weight]:
        found = super().weights()
        order = head_order(self.head_dim, self.rope.rotated_dim or self.head_dim, interleaved=self.interleaved)
        for name, weight in found.items():
            if name.startswith("qkv_"):
                queries, keys, values = weight.rows
                rows = (replace(queries, order=order), replace(keys, order=order), values)
                found[name] = refine(StoredWeight, weight, rows=rows)
            elif name in ("q_norm", "k_norm"):
                found[name] = refine(StoredWeight, weight, rows=(Dim(1, self.head_dim, order=order),))
        return _as_one(found, "qkv_") if self.as_one else found


@dataclass(frozen=True, kw_only=True)
class StoredMlpSpec(MlpSpec):
    """Checkpoints have one tensor `gate_up_proj`."""

    def weights(self) -> dict[str, Weight]:
        return _as_one(super().weights(), "gate_up_")
