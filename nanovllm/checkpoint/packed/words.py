"""The order in which packed numbers lie in memory where kernels read them: 32-bit words of pairs.

A row is cut into spans. Word c of a span holds the columns `distance` * j + 2 c and `distance` * j + 2 c + 1 for each
j: two for 8-bit numbers, four for 4-bit ones. The first of a pair has bits `bits` * j and up of the word, the second
those 16 bits higher. So one shift and one mask give two adjacent columns in the two halves of a register, and the
words that a thread reads with one load belong to columns that are adjacent in the inputs, for each j.

A 4-bit float (e2m1) becomes a bfloat16 when its sign is put at bit 15 and its other bits at 8 to 6. That would take two
shifts and two masks for each pair, so words of floats have their bits in another order: `FLOAT_BITS`.
"""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

DISTANCES = (64, 32, 16)  # the larger, the longer are the pieces of inputs that are read at once
# From bit, number of bits, to bit; in the low half of a word, and 16 bits higher in the high half. One mask takes the
# first pair from there, one rotation and the same mask the second and the third: left by 4, right by 6 (from bit 21,
# which is in the other half). The last one takes two shifts: left by 6, and right by 2 for the bit at 10.
FLOAT_BITS = (
    (0, 3, 6),
    (3, 1, 15),
    (4, 3, 2),
    (7, 1, 11),
    (8, 3, 12),
    (11, 1, 21),
    (12, 2, 0),
    (14, 1, 10),
    (15, 1, 9),
)


class WordOrder(NamedTuple):
    bits: int
    distance: int  # columns between the pairs of a word
    floats: bool = False  # of 4 bits: they have the order `FLOAT_BITS`

    @property
    def num_pairs(self) -> int:
        return 16 // self.bits

    @property
    def span(self) -> int:  # columns
        return self.distance * self.num_pairs


def word_order(bits: int, num_columns: int, group: int, floats: bool = False) -> WordOrder | None:
    """The order for rows of so many columns of which `group` share a scale. None: there is no order that fits."""
    fits = (WordOrder(bits, distance, floats) for distance in DISTANCES if group % distance == 0)
    return next((order for order in fits if num_columns % order.span == 0), None)


def words_on(device: torch.device, bits: int, num_columns: int, group: int, floats: bool = False) -> WordOrder | None:
    """The order that weights have on a device: None on a CPU, where no kernel reads words."""
    return None if device.type == "cpu" else word_order(bits, num_columns, group, floats)


def to_words(codes: Tensor, order: WordOrder) -> Tensor:
    """Bytes [..., n], with the columns in their order, 4-bit numbers with the even column in the low half -> the same
    number of bytes in the order of words."""
    octets = codes.view(torch.uint8)
    if order.bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
    # [..., span, pair, word, of the pair] -> [..., span, word, of the pair, pair]
    items = octets.unflatten(-1, (-1, order.num_pairs, order.distance // 2, 2)).movedim(-3, -1)
    if order.bits == 4:
        items = items[..., ::2] | items[..., 1::2] << 4
    octets = items.flatten(-4)
    if order.floats:
        octets = _moved(octets, FLOAT_BITS)
    return octets.view(codes.dtype)


def from_words(codes: Tensor, order: WordOrder) -> Tensor:
    """The inverse of `to_words`."""
    octets = codes.view(torch.uint8)
    if order.floats:
        octets = _moved(octets, [(to, width, begin) for begin, width, to in FLOAT_BITS])
    if order.bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
    items = octets.unflatten(-1, (-1, order.distance // 2, 2, order.num_pairs)).movedim(-1, -3).flatten(-4)
    if order.bits == 4:
        items = items[..., ::2] | items[..., 1::2] << 4
    return items.contiguous().view(codes.dtype)


def _moved(octets: Tensor, moves: Iterable[tuple[int, int, int]]) -> Tensor:
    """Words with their bits in another order."""
    words = octets.contiguous().view(torch.int32).long()
    moved = torch.zeros_like(words)
    for begin, width, to in moves:
        both = ((1 << width) - 1) * 0x10001
        bits = (words << (32 - begin % 32) | (words & 0xFFFFFFFF) >> begin % 32) & both  # rotated to the right
        bits = bits << to
        moved |= bits | bits >> 32
    return moved.to(torch.int32).view(torch.uint8)
