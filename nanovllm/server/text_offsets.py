"""Where the text of each token starts in a text, counted in characters."""

from collections.abc import Sequence

from nanovllm.text.detokenizer import Detokenizer
from nanovllm.text.tokenizer import Tokenizer


class TextOffsets:
    """The offsets of a completion's tokens, one after the other.

    A token that continues a character starts where that character starts. Without a tokenizer there is no text, and all
    offsets are 0.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, *, prompt_token_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self.offset = 0  # of the next token
        self._detokenizer = None
        if tokenizer is not None:
            self._detokenizer = Detokenizer(
                tokenizer, prompt_token_ids=prompt_token_ids, skip_special_tokens=skip_special_tokens
            )

    def take(self, token_id: int) -> int:
        """The offset of the next token."""
        start = self.offset
        if self._detokenizer is not None:
            self._detokenizer.append([token_id])
            self.offset += len(self._detokenizer.take_new())
        return start


def prompt_offsets(tokenizer: Tokenizer | None, text: str, token_ids: Sequence[int]) -> list[int]:
    """The offsets of a prompt's tokens in its text. Special tokens that the tokenizer added are not in the text."""
    if tokenizer is None:
        return [0] * len(token_ids)
    offsets = TextOffsets(tokenizer, skip_special_tokens=False)
    pieces = tokenizer.pieces(skip_special_tokens=False)
    starts = []
    for token_id in token_ids:
        special = pieces[token_id].decode() if token_id in tokenizer.all_special_ids else ""
        is_in_text = text.startswith(special, offsets.offset)
        starts.append(offsets.take(token_id) if is_in_text else offsets.offset)
    return [min(start, len(text)) for start in starts]
