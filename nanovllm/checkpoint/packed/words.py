"""The order in which packed numbers lie in memory where kernels read them: 32-bit words of pairs.

A row is cut into spans. Word c of a span holds the columns `distance` * j + 2 c and `distance` * j + 2 c + 1 for each
j: two for 8-bit numbers, four for 4-bit ones. The first of a pair has bits `bits` * j and up of the word, the second
those 16 bits higher. So one shift and one mask give two adjacent columns in the two halves of a register, and the
words that a thread reads with one load belong to columns that are adjacent in the inputs, for each j.
"""

from typing import NamedTuple

import torch
from torch import Tensor

DISTANCES = (64, 32, 16)  # the larger, the longer are the pieces of inputs that are read at once


class WordOrder(NamedTuple):
    bits: int
    distance: int  # columns between the pairs of a word

    @property
    def num_pairs(self) -> int:
        return 16 // self.bits

    @property
    def span(self) -> int:  # columns
        return self.distance * self.num_pairs


def word_order(bits: int, num_columns: int, group: int) -> WordOrder | None:
    """The order for rows of so many columns of which `group` share a scale. None: there is no order that fits."""
    fits = (WordOrder(bits, distance) for distance in DISTANCES if group % distance == 0)
    return next((order for order in fits if num_columns % order.span == 0), None)


def words_on(device: torch.device, bits: int, num_columns: int, group: int) -> WordOrder | None:
    """The order that weights have on a device: None on a CPU, where no kernel reads words."""
    return None if device.type == "cpu" else word_order(bits, num_columns, group)


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
    return items.flatten(-4).view(codes.dtype)


def from_words(codes: Tensor, order: WordOrder) -> Tensor:
    """The inverse of `to_words`."""
    octets = codes.view(torch.uint8)
    if order.bits == 4:
        octets = torch.stack([octets & 15, octets >> 4], dim=-1).flatten(-2)
    items = octets.unflatten(-1, (-1, order.distance // 2, 2, order.num_pairs)).movedim(-1, -3).flatten(-4)
    if order.bits == 4:
        items = items[..., ::2] | items[..., 1::2] << 4
    return items.contiguous().view(codes.dtype)
