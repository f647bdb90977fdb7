"""The text of a completion that is read after every step: for streams and for stop strings."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from nanovllm.engine.sequence import Sequence
from nanovllm.engine.whole_text import end_of_text
from nanovllm.text.detokenizer import Detokenizer

if TYPE_CHECKING:
    from nanovllm.text.tokenizer import Tokenizer


class GrowingText:
    def __init__(
        self, seq: Sequence, tokenizer: "Tokenizer | None", *, finish: Callable[[Sequence, str, str], None]
    ) -> None:
        """Without a tokenizer there is no text, only new tokens. `finish`: ends a sequence at a stop string."""
        self._seq = seq
        self._finish = finish
        self.num_read = 0  # tokens that `read_new_tokens` has seen
        self.num_sent_tokens = 0  # that were in deltas
        self.end_sent = False  # a delta had the finish reason
        self._detokenizer = None if tokenizer is None else _detokenizer(seq, tokenizer)

    def read_new_tokens(self) -> bool:
        """Add the sequence's new tokens to the text and end it at a stop string; returns whether there were any."""
        seq, detokenizer = self._seq, self._detokenizer
        if seq.num_completion_tokens == self.num_read:
            return False
        if detokenizer is not None:
            new = seq.token_ids[seq.num_prompt_tokens + detokenizer.num_tokens : end_of_text(seq)]
            stop = detokenizer.append(new)
            if stop is not None:
                self._stop_at(stop, num_tokens=detokenizer.num_tokens)
        self.num_read = seq.num_completion_tokens
        return True

    def _stop_at(self, stop: str, *, num_tokens: int) -> None:
        """Cut the sequence after the token that completed a stop string."""
        seq = self._seq
        if not seq.finished:
            self._finish(seq, "stop", stop)
        del seq.token_ids[seq.num_prompt_tokens + num_tokens :], seq.logprobs[num_tokens:]
        seq.finish_reason, seq.stop_reason = "stop", stop

    def text(self) -> str:
        """The text so far, without what `take_new` returned."""
        self._show_held_text()
        return "" if self._detokenizer is None else self._detokenizer.text

    def take_new(self) -> str:
        """The text since the last call."""
        self._show_held_text()
        return "" if self._detokenizer is None else self._detokenizer.take_new()

    def _show_held_text(self) -> None:
        """Once no more tokens come, add the text that was held back because it could have become a stop string."""
        if self._seq.finished and self._detokenizer is not None and not isinstance(self._seq.stop_reason, str):
            self._detokenizer.finish()


def _detokenizer(seq: Sequence, tokenizer: "Tokenizer") -> Detokenizer:
    return Detokenizer(
        tokenizer,
        stop=seq.params.stop or (),
        include_stop_str_in_output=seq.params.include_stop_str_in_output,
        skip_special_tokens=seq.params.skip_special_tokens,
        min_tokens=seq.params.min_tokens,
        prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
    )
