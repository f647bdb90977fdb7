"""What the kernels need to know of a step's sequences; `layers/sequences.py` describes and makes them."""

from typing import Protocol

from torch import Tensor

CHUNK = 64  # tokens of a sequence that the kernels for prompts compute together

# Views into a step's packed buffer have any alignment: one kernel is compiled for all.
OF_ANY_ALIGNMENT = ["rows", "starts", "first_tokens", "num_new", "token_seqs", "chunks", "first_chunks"]


class NewTokens(Protocol):
    """[num_seqs] int32 each, except for `token_seqs`."""

    @property
    def rows(self) -> Tensor: ...  # of the states
    @property
    def starts(self) -> Tensor: ...  # position of the first new token; 0: the state is taken to be zero; -1: padding
    @property
    def first_tokens(self) -> Tensor: ...  # index of the first new token among the step's tokens
    @property
    def num_new(self) -> Tensor: ...
    @property
    def token_seqs(self) -> Tensor: ...  # [num_tokens] number of the sequence that each token belongs to
