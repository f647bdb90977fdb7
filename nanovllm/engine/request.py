"""A user's request: one prompt, its `n` sequences, and the outputs made of them."""

import time
from typing import TYPE_CHECKING

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.text.detokenizer import Detokenizer
    from nanovllm.text.tokenizer import Tokenizer


class Completion:
    """A sequence and its text. Without stop strings and streaming the text is made once, at the end."""

    def __init__(self, seq: Sequence, tokenizer: "Tokenizer | None", *, incremental: bool) -> None:
        self.seq = seq
        params = seq.params
        self.tokenizer = tokenizer if params.detokenize else None
        self.num_read = 0  # tokens that `read_new_tokens` has seen
        self._logprobs: list[dict[int, Logprob]] = []  # of the sequence, in the form of outputs, as far as reported
        self.num_sent_tokens = 0  # that were in deltas
        self.end_sent = False  # a delta had the finish reason
        self.detokenizer = _detokenizer(seq, self.tokenizer) if incremental and self.tokenizer is not None else None

    def read_new_tokens(self) -> str | None:
        """Add the sequence's new tokens to the text; returns the stop string that they complete, if any."""
        self.num_read = self.seq.num_completion_tokens
        if self.detokenizer is None:
            return None
        begin = self.seq.num_prompt_tokens + self.detokenizer.num_tokens
        return self.detokenizer.append(self.seq.token_ids[begin : self._shown_end()])

    def stop_at(self, stop: str) -> None:
        """Cut the sequence after the token that completed a stop string."""
        assert self.detokenizer is not None
        seq = self.seq
        del seq.token_ids[seq.num_prompt_tokens + self.detokenizer.num_tokens :]
        del seq.logprobs[seq.num_completion_tokens :], self._logprobs[seq.num_completion_tokens :]
        self.num_read = seq.num_completion_tokens
        seq.finish_reason, seq.stop_reason = "stop", stop

    def _shown_end(self) -> int:
        """The end of the tokens that become text: a stop token does not, unless the request asks for it."""
        seq = self.seq
        ended_by_token = seq.finish_reason == "stop" and not isinstance(seq.stop_reason, str)
        return seq.num_tokens - (ended_by_token and not seq.params.include_stop_str_in_output)

    def text(self) -> str:
        if self.tokenizer is None:
            return ""
        if self.detokenizer is not None:
            return self.detokenizer.text
        token_ids, num_prompt = self.seq.token_ids, self.seq.num_prompt_tokens
        shown = token_ids[num_prompt : self._shown_end()]
        return self.tokenizer.pieces(self.seq.params.skip_special_tokens).text(token_ids[:num_prompt], shown)

    def show_held_text(self) -> None:
        """Once no more tokens come, add the text that was held back because it could have become a stop string."""
        if self.seq.finished and self.detokenizer is not None and not isinstance(self.seq.stop_reason, str):
            self.detokenizer.finish()

    def stop_reason(self, eos_token_ids: frozenset[int]) -> int | str | None:
        reason = self.seq.stop_reason
        by_eos = reason in eos_token_ids and reason not in (self.seq.params.stop_token_ids or ())
        return None if by_eos else reason

    def output(self, eos_token_ids: frozenset[int]) -> CompletionOutput:
        seq = self.seq
        self.show_held_text()
        wants_logprobs = seq.params.logprobs is not None
        if wants_logprobs:
            from nanovllm.engine.logprobs import to_logprobs

            self._logprobs += [to_logprobs(entry, self.tokenizer) for entry in seq.logprobs[len(self._logprobs) :]]
        return CompletionOutput(
            index=seq.index,
            text=self.text(),
            token_ids=seq.completion_token_ids,
            cumulative_logprob=sum(entry.logprobs[0] for entry in seq.logprobs) if wants_logprobs else None,
            logprobs=list(self._logprobs) if wants_logprobs else None,
            finish_reason=seq.finish_reason,  # type: ignore[arg-type]
            stop_reason=self.stop_reason(eos_token_ids),
        )


class Request:
    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        seqs: list[Sequence],
        params: SamplingParams,
        tokenizer: "Tokenizer | None",
        *,
        stream: bool,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.params = params
        self.stream = stream
        self.prompt_token_ids = seqs[0].token_ids[:]
        self.completions = [Completion(seq, tokenizer, incremental=stream or bool(params.stop)) for seq in seqs]
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.tokenizer = tokenizer

    @property
    def seqs(self) -> list[Sequence]:
        return [completion.seq for completion in self.completions]

    @property
    def finished(self) -> bool:
        return all(completion.seq.finished for completion in self.completions)

    def output(self, eos_token_ids: frozenset[int]) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion.output(eos_token_ids) for completion in self.completions],
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.completions[0].seq.num_cached_tokens,
            prompt_logprobs=self._prompt_logprobs(),
        )

    def _prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        from nanovllm.engine.logprobs import to_logprobs

        entries = self.completions[0].seq.prompt_logprobs
        return [None, *(to_logprobs(entry, self.tokenizer) for entry in entries)]  # nothing predicts the first token


def _detokenizer(seq: Sequence, tokenizer: "Tokenizer") -> "Detokenizer":
    from nanovllm.text.detokenizer import Detokenizer

    return Detokenizer(
        tokenizer,
        stop=seq.params.stop or (),
        include_stop_str_in_output=seq.params.include_stop_str_in_output,
        skip_special_tokens=seq.params.skip_special_tokens,
        min_tokens=seq.params.min_tokens,
        prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
    )
