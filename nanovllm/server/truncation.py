"""`truncate_prompt_tokens` and `truncation_side`: shorten a prompt instead of refusing it."""

from dataclasses import dataclass
from typing import Literal

from nanovllm.server.errors import refuse

Side = Literal["left", "right"]
AS_MANY_AS_FIT = -1


@dataclass(frozen=True)
class Truncation:
    """Keep at most `max_tokens` tokens of a prompt. `side` is the one that is cut: "left" keeps the last tokens."""

    max_tokens: int
    side: Side

    def apply(self, token_ids: list[int]) -> list[int]:
        if len(token_ids) <= self.max_tokens:
            return token_ids
        return token_ids[-self.max_tokens :] if self.side == "left" else token_ids[: self.max_tokens]


def read_truncation(
    truncate_prompt_tokens: int | None, truncation_side: str | None, *, default_side: Side, room: int
) -> Truncation | None:
    """The truncation that a request asks for, if any. `room`: how many tokens -1 means."""
    if truncation_side not in (None, "left", "right"):
        raise refuse("truncation_side", "must be left or right")
    if truncate_prompt_tokens is None:
        return None
    if truncate_prompt_tokens < 1 and truncate_prompt_tokens != AS_MANY_AS_FIT:
        raise refuse("truncate_prompt_tokens", "must be at least 1, or -1 for as many tokens as fit")
    max_tokens = max(room, 1) if truncate_prompt_tokens == AS_MANY_AS_FIT else truncate_prompt_tokens
    side: Side = default_side if truncation_side is None else "left" if truncation_side == "left" else "right"
    return Truncation(max_tokens, side)
