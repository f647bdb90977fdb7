"""The sequences of a step, for layers that keep a state per row of the request table."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Sequences:
    """The sequences of a step, whose new tokens lie side by side; [num_seqs] int32 each, on the device.

    A layer with a `RowState` has a tensor [max_num_seqs + 1, *shape] and reads and writes it at `rows`. What it finds
    there was written by the tokens before `starts`, or, where `starts` is 0, by an earlier sequence: then it must take
    the state to be zero. Row 0 is padding, with a start of -1; what is written there is never used.
    """

    rows: Tensor  # of the request table
    starts: Tensor  # position of the first new token
    first_tokens: Tensor  # index of the first new token among the step's tokens
    num_new: Tensor
