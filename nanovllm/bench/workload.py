"""The published workload of nano-vllm and mini-sglang, generated with the same random numbers.

256 requests from seed 0: prompts of 100 to 1024 random tokens, outputs of 100 to 1024, temperature 0.6, end-of-sequence
ignored. That is 142,827 prompt tokens and 133,966 output tokens. Because of the mixed lengths, almost every step has
sequences of very different lengths, requests that end and requests that begin.
"""

from dataclasses import dataclass
from random import Random

from nanovllm.errors import ConfigError
from nanovllm.sampling_params import SamplingParams

LARGEST_TOKEN = 10_000  # inclusive, as published


@dataclass(frozen=True)
class Workload:
    """Prompts as token ids, and the output length of each."""

    prompts: list[list[int]]
    output_lens: list[int]
    temperature: float = 0.6

    @property
    def input_lens(self) -> list[int]:
        return list(map(len, self.prompts))

    @property
    def num_input_tokens(self) -> int:
        return sum(self.input_lens)

    @property
    def params(self) -> list[SamplingParams]:
        return [
            SamplingParams(temperature=self.temperature, ignore_eos=True, max_tokens=output_len)
            for output_len in self.output_lens
        ]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lens)

    def first_tokens(self, count: int) -> "Workload":
        """The same prompts with outputs of at most `count` tokens."""
        return Workload(self.prompts, [min(count, wanted) for wanted in self.output_lens], self.temperature)

    def staggered(self) -> "Workload":
        """The same prompts with outputs cut so that one request ends in each step: the batch takes on every size."""
        by_length = sorted(range(len(self.output_lens)), key=self.output_lens.__getitem__)
        cut = {index: min(self.output_lens[index], rank + 2) for rank, index in enumerate(by_length)}
        return Workload(self.prompts, [cut[index] for index in range(len(cut))], self.temperature)

    def check_fits(self, max_model_len: int) -> None:
        """Raise ConfigError if a request exceeds the model's length limit: its output would be cut off."""
        pairs = zip(self.prompts, self.output_lens, strict=True)
        longest = max(len(prompt) + output_len for prompt, output_len in pairs)
        if longest > max_model_len:
            raise ConfigError(
                f"max_model_len={max_model_len}: the longest request of this workload needs {longest} tokens; "
                "raise it, or draw shorter requests with input_len and output_len"
            )


def make_workload(
    *,
    num_seqs: int = 256,
    input_len: tuple[int, int] = (100, 1024),
    output_len: tuple[int, int] = (100, 1024),
    max_tokens: int | None = None,  # cuts the drawn output lengths
    seed: int = 0,
    vocab_size: int | None = None,
    temperature: float = 0.6,
) -> Workload:
    random = Random(seed)
    largest = LARGEST_TOKEN if vocab_size is None else min(LARGEST_TOKEN, vocab_size - 1)
    prompts = [[random.randint(0, largest) for _ in range(random.randint(*input_len))] for _ in range(num_seqs)]
    output_lens = [random.randint(*output_len) for _ in range(num_seqs)]
    workload = Workload(prompts, output_lens, temperature)
    return workload if max_tokens is None else workload.first_tokens(max_tokens)
