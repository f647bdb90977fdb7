"""A user's request: one prompt, its `n` sequences, and the outputs made of them."""

import time
from typing import TYPE_CHECKING

from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.growing_text import GrowingText
    from nanovllm.text.tokenizer import Tokenizer


class Completion:
    """A sequence and its text, which is made once at the end unless it is read after every step."""

    def __init__(self, seq: Sequence, tokenizer: "Tokenizer | None") -> None:
        self.seq = seq
        self.tokenizer = tokenizer if seq.params.detokenize else None
        self.growing: GrowingText | None = None  # with streaming or stop strings
        self._logprobs: list[dict[int, Logprob]] = []  # of the sequence, in the form of outputs, as far as reported

    def text(self) -> str:
        if self.growing is not None:
            return self.growing.text()
        if self.tokenizer is None:
            return ""
        from nanovllm.engine.whole_text import whole_text

        return whole_text(self.seq, self.tokenizer)

    def stop_reason(self, eos_token_ids: frozenset[int]) -> int | str | None:
        reason = self.seq.stop_reason
        by_eos = reason in eos_token_ids and reason not in (self.seq.params.stop_token_ids or ())
        return None if by_eos else reason

    def output(self, eos_token_ids: frozenset[int]) -> CompletionOutput:
        output = CompletionOutput(
            index=self.seq.index,
            text=self.text(),
            token_ids=self.seq.completion_token_ids,
            finish_reason=self.seq.finish_reason,  # type: ignore[arg-type]
            stop_reason=self.stop_reason(eos_token_ids),
        )
        if self.seq.params.logprobs is not None:
            from nanovllm.engine.logprobs import add_logprobs

            add_logprobs(output, self.seq, self.tokenizer, known=self._logprobs)
        return output


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
        self.completions = [Completion(seq, tokenizer) for seq in seqs]
        self.metrics = RequestMetrics(arrival_time=time.monotonic())
        self.tokenizer = tokenizer

    @property
    def seqs(self) -> list[Sequence]:
        return [completion.seq for completion in self.completions]

    @property
    def finished(self) -> bool:
        return all(completion.seq.finished for completion in self.completions)

    def output(self, eos_token_ids: frozenset[int]) -> RequestOutput:
        output = RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion.output(eos_token_ids) for completion in self.completions],
            finished=self.finished,
            metrics=self.metrics,
            num_cached_tokens=self.seqs[0].num_cached_tokens,
        )
        if self.params.prompt_logprobs is not None:
            from nanovllm.engine.logprobs import prompt_logprobs

            output.prompt_logprobs = prompt_logprobs(self.seqs[0], self.tokenizer)
        return output
