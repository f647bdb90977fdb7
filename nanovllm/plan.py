"""What travels between the control plane and the device: plain frozen data, one plan out and one result back a step.

A plan says only what changed. A row whose single new token is already on the device appears in `decode_rows` and
nowhere else, so an unchanged decode step carries the very same tuple as the step before it.
"""

from dataclasses import dataclass, field

from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence takes a row of the device tables: all its known tokens, its blocks so far and how to sample it."""

    row: int
    token_ids: tuple[int, ...]  # prompt, and after a preemption also what was generated before it
    num_prompt_tokens: int
    # one per paged group; blocks that have left a group's window are 0 and must not be read
    block_tables: tuple[tuple[int, ...], ...]
    params: SamplingParams
    seed: int  # of this completion; the noise of position p depends on (seed, p) alone
    stop_token_ids: tuple[int, ...]  # not to be sampled before min_tokens
    bad_words: tuple[tuple[int, ...], ...]  # token sequences whose last token is refused after the others


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to a row's block table from position `index` on."""

    row: int
    index: int
    blocks: tuple[int, ...]
    group: int = 0  # of the paged groups


@dataclass(frozen=True, slots=True)
class SeqPlan:
    """A prefill chunk: compute positions [start, start + num_new) of a row from tokens the device holds."""

    row: int
    start: int
    num_new: int
    samples: bool  # the chunk reaches the last known token, so the next one is sampled
    num_prompt_logprobs: int | None = None  # score the chunk's prompt tokens with this many alternatives


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. Sampled tokens come back in the order: decode rows, then the chunks that sample."""

    decode_rows: tuple[int, ...] = ()
    chunks: tuple[SeqPlan, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    guided_rows: tuple[int, ...] = ()  # sampled rows whose token a mask limits; masks come when the step has begun

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(chunk.num_new for chunk in self.chunks)

    def sampled_rows(self) -> tuple[int, ...]:
        if not self.chunks:
            return self.decode_rows
        return self.decode_rows + tuple(chunk.row for chunk in self.chunks if chunk.samples)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the chosen token first, then the most likely ones in order (the chosen may be among them)."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # of the chosen token; 1 = most likely


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave. Lists run parallel to `StepPlan.sampled_rows()`."""

    tokens: list[list[int]] = field(default_factory=list)  # one list a sampled row: speculation may give several
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index into `tokens`, where asked for
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: the chunk's scored tokens
