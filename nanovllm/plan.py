"""What travels between the control plane and the device: plain frozen data, one plan out and one result back per step.

A plan describes only what changed. A row that computes its newest token and samples the next one appears in
`decode_rows` and nowhere else, so an unchanged decode step is the same StepPlan object as the step before it.
"""

from dataclasses import dataclass, field

from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence takes a row of the device tables: its known tokens, its blocks so far and how to sample it."""

    row: int
    token_ids: tuple[int, ...]  # the prompt; after a preemption also what was generated before it
    num_prompt_tokens: int
    # one per paged group; blocks that have left a group's window are 0 and must not be read
    block_tables: tuple[tuple[int, ...], ...]
    params: SamplingParams
    seed: int  # of this completion; the noise at position p depends on (seed, p) alone
    stop_token_ids: tuple[int, ...]  # not sampled before min_tokens
    bad_words: tuple[tuple[int, ...], ...]  # token sequences whose last token is refused after the others


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """Blocks appended to a row's block table, from position `index` of the table on."""

    row: int
    index: int
    blocks: tuple[int, ...]
    group: int = 0  # of the paged groups


@dataclass(frozen=True, slots=True)
class RowStep:
    """Compute positions [start, start + num_new) of a row. Three kinds:

      prompt chunk  the tokens are in the device tables; the chunk that reaches the last known token samples one token
      verification  the newest known token and the `proposed` ones after it; a token is sampled after each of them. The
                    result has the sampled tokens up to the first one that differs from the proposed one.
      pooling       a prompt chunk of a row that samples nothing; with its last chunk the result has one vector for the
                    whole prompt: the final hidden state of the last token, or the mean of all

    The next plan with a verified row describes it by a RowStep again, whose `start` says how many tokens were kept.
    """

    row: int
    start: int
    num_new: int
    num_sampled: int = 0  # a token is sampled after each of the last `num_sampled` positions
    proposed: tuple[int, ...] = ()  # tokens of the last positions
    pooling: str | None = None  # "last" or "mean"
    num_prompt_logprobs: int | None = None  # score the chunk's prompt tokens with this many alternatives

    @property
    def num_known(self) -> int:
        """Tokens of the row up to the end of this step that are known, not proposed."""
        return self.start + self.num_new - len(self.proposed)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: rows that advance by one token, and rows described by a RowStep."""

    decode_rows: tuple[int, ...] = ()
    row_steps: tuple[RowStep, ...] = ()
    new_rows: tuple[NewRow, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    state_copies: tuple[tuple[int, int, bool], ...] = ()  # before it: row's state to checkpoint, or (True) back
    guided_rows: tuple[int, ...] = ()  # sampled rows limited by a mask; the masks come after the step was launched

    @property
    def num_tokens(self) -> int:
        return len(self.decode_rows) + sum(step.num_new for step in self.row_steps)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of prompt chunks."""
        return sum(step.num_new for step in self.row_steps if not step.proposed)

    def sampled_positions(self) -> tuple[int, ...]:
        """The row of each sampled position: a row whose proposed tokens are verified occurs several times."""
        if not self.row_steps:
            return self.decode_rows
        return self.decode_rows + tuple(step.row for step in self.row_steps for _ in range(step.num_sampled))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """One position: the chosen token first, then the most likely ones in order (the chosen may be among them).

    With `SamplingParams.logprob_token_ids` the others are these tokens.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int  # of the chosen token; 1 = most likely


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of a step."""

    tokens: list[list[int]] = field(default_factory=list)  # by row that samples: decode rows, then row steps
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by index into `tokens`, where asked for
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)  # by row: the chunk's scored tokens
    pooled: dict[int, list[float]] = field(default_factory=dict)  # by row, of unit length, when its last chunk has run
