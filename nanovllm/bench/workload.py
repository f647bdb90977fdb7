"""The published workload: what nano-vllm and mini-sglang measure themselves with, drawn in the very same order.

256 requests from seed 0; each prompt has 100 to 1024 random tokens, each answer 100 to 1024, temperature 0.6, and no
answer ends early. That is 142,827 tokens in and 133,966 out. The lengths are what makes it hard: every step holds
sequences of very different ages, some request always ends and another is always being admitted.
"""

from dataclasses import dataclass
from random import Random

from nanovllm.errors import ConfigError
from nanovllm.sampling_params import SamplingParams

LARGEST_TOKEN = 10_000  # inclusive, as published


@dataclass(frozen=True)
class Workload:
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
        """The same prompts with answers of at most `count` tokens."""
        return Workload(self.prompts, [min(count, wanted) for wanted in self.output_lens], self.temperature)

    def staggered(self) -> "Workload":
        """The same prompts, the answers cut so that one request ends a step: the batch takes every size on its way."""
        by_length = sorted(range(len(self.output_lens)), key=self.output_lens.__getitem__)
        cut = {index: min(self.output_lens[index], rank + 2) for rank, index in enumerate(by_length)}
        return Workload(self.prompts, [cut[index] for index in range(len(cut))], self.temperature)

    def check_fits(self, max_model_len: int) -> None:
        """Raise if a request is longer than the model's limit: its answer would silently be cut short."""
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
