"""One completion of one prompt, as the scheduler sees it."""

from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from nanovllm.engine.prefix import NO_EXTRAS, BlockKey, PrefixNode
from nanovllm.plan import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.guide import Guide


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class BlockTable:
    """The blocks of a sequence in one group, by position // block_size."""

    blocks: list[int]
    first: int = 0  # index of the first block that is held: those before have left the window

    @property
    def held(self) -> list[int]:
        return self.blocks[self.first :]


@dataclass(slots=True, eq=False, repr=False)
class Sequence:
    """Tokens, counts, block table and row of one completion.

    Three lengths that are easily confused:
      num_tokens           tokens whose value the host knows (prompt and generated)
      num_computed_tokens  positions whose KV is computed or launched, proposed tokens not counted; if it is not
                           smaller than `num_tokens`, a sampled token is still in flight
      num_cached_tokens    prompt positions that were found in the prefix cache when the sequence first ran
    """

    request_id: str
    prompt_token_ids: InitVar[list[int]]
    params: SamplingParams
    _: KW_ONLY
    max_num_tokens: int  # prompt and completion together
    stop_token_ids: frozenset[int] = frozenset()
    index: int = 0  # which of the n completions of its request
    seed: int = 0
    priority: int = 0  # smaller runs first
    arrival: int = 0
    cache_salt: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    guide: "Guide | None" = None
    pooling: str | None = None  # "last" or "mean": it ends with one vector for its prompt, without new tokens

    token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    # what the content of its blocks depends on beside the tokens, as block digests read it
    extras: bytes = field(init=False)
    # completions of the same prompt that wait until it is in the prefix cache
    followers: "list[Sequence]" = field(init=False, default_factory=list)

    status: SequenceStatus = field(init=False, default=SequenceStatus.WAITING)
    finish_reason: str | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    row: int = field(init=False, default=0)  # of the device tables while running; 0 is the padding row
    block_tables: list[BlockTable] = field(init=False, default_factory=list)  # one per paged group while running
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    was_verified: bool = field(init=False, default=False)  # the last step of its row verified proposed tokens
    # where that step started, if rejected tokens are in the state of its row
    redo_from: int | None = field(init=False, default=None)
    # the full blocks known to the prefix cache: how many, and the last of them, while running
    num_cached_blocks: int = field(init=False, default=0)
    prefix: PrefixNode = field(init=False)
    block_keys: list[BlockKey] = field(init=False, default_factory=list)  # of its first full blocks
    # `num_computed_tokens` from which schedule() must look at it (new block, length reached), and `num_tokens` from
    # which update() must (block full, length reached): one comparison each per step
    event_at: int = field(init=False, default=0)
    check_at: int = field(init=False, default=0)
    logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(init=False, default_factory=list)
    pooled: list[float] = field(init=False, default_factory=list)

    def __post_init__(self, prompt_token_ids: list[int]) -> None:
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.extras = NO_EXTRAS
        if self.cache_salt is not None:
            from nanovllm.engine.extras import encode_extras

            self.extras = encode_extras(("cache_salt", self.cache_salt))

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def has_token_in_flight(self) -> bool:
        return self.num_computed_tokens >= self.num_tokens

    @property
    def needs_all_positions(self) -> bool:
        """Whether every prompt position must be computed, so that none can come from the prefix cache."""
        return self.pooling == "mean" or (self.params.prompt_logprobs is not None and not self.prompt_logprobs)

    @property
    def order(self) -> tuple[int, int, int]:
        """Sort key: smaller runs first and is preempted last."""
        return (self.priority, self.arrival, self.index)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}.{self.index}, {self.status.name.lower()}, {self.num_prompt_tokens} prompt + "
            f"{self.num_completion_tokens} new tokens, {self.num_computed_tokens} computed, row {self.row})"
        )
