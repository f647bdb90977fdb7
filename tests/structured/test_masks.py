"""Packed masks on the device: each bit allows or refuses its token, and other logits processors cannot undo a mask."""

import numpy as np
import pytest
import torch

from nanovllm.runner.logits import NEVER, Masks

CPU = torch.device("cpu")


@pytest.mark.parametrize("vocab_size", [1, 8, 37, 600])
def test_bits_refuse_what_they_do_not_allow(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    allowed = generator.random((3, vocab_size)) < 0.3
    packed = [np.packbits(row, bitorder="little").tobytes() + bytes(8) for row in allowed]
    rows = (9, 4, 7, 2)  # row 7 has no mask
    logits = torch.randn(4, vocab_size)
    before = logits.clone()
    Masks({4: [packed[1]], 9: [packed[0]], 2: [packed[2]]}, rows, vocab_size, CPU).refuse(logits)
    for index, expected in ((0, allowed[0]), (1, allowed[1]), (3, allowed[2])):
        assert torch.equal(logits[index] == NEVER, torch.from_numpy(~expected))
        assert torch.equal(logits[index, expected], before[index, expected])
    assert torch.equal(logits[2], before[2])


def test_processors_are_undone_only_if_they_leave_no_token() -> None:
    masks = Masks({1: [bytes([0b0101])], 2: [bytes([0b0010])]}, (1, 2, 3), 4, CPU)
    logits = torch.arange(12.0).view(3, 4)
    masks.refuse(logits)
    logits[0, 2] = NEVER  # one of the two allowed tokens is left
    logits[1, 1] = NEVER  # the only allowed token is gone
    logits[2] = NEVER  # this row has no grammar
    masks.restore(logits)
    assert logits.tolist() == [[0.0, NEVER, NEVER, NEVER], [NEVER, 5.0, NEVER, NEVER], [NEVER] * 4]


def test_each_position_of_a_row_has_its_own_mask() -> None:
    """Where proposed tokens are verified a row occurs several times, and the last of its positions may have no mask."""
    masks = Masks({1: [bytes([0b0001])], 2: [bytes([0b0010]), bytes([0b0100])]}, (2, 1, 2, 3, 2), 4, CPU)
    logits = torch.zeros(5, 4)
    masks.refuse(logits)
    assert [(row == 0).nonzero()[:, 0].tolist() for row in logits] == [[1], [0], [2], [0, 1, 2, 3], [0, 1, 2, 3]]
