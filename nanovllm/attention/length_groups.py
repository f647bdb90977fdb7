"""Sequences of very different lengths, split into groups that are padded to the longest of each."""

import numpy as np


def similar(lengths: np.ndarray, most_padding: int) -> list[np.ndarray]:
    """Groups of similar length, as indices: a group ends where its padding would exceed `most_padding` positions."""
    order = np.argsort(-lengths, kind="stable")
    groups, begin, padding = [], 0, 0
    for i, row in enumerate(order):
        padding += int(lengths[order[begin]] - lengths[row])
        if padding > most_padding:
            groups.append(order[begin:i])
            begin, padding = i, 0
    return [*groups, order[begin:]]
