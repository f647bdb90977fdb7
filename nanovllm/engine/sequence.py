"""One completion of one prompt, as the scheduler sees it."""

from enum import Enum, auto
from typing import TYPE_CHECKING

from nanovllm.engine.prefix import NO_EXTRAS, BlockKey, PrefixNode, encode_extras
from nanovllm.plan import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.guide import Guide


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class BlockTable:
    """The blocks of a sequence in one group, by position // block_size."""

    __slots__ = ("blocks", "first")

    def __init__(self, blocks: list[int], first: int = 0) -> None:
        self.blocks = blocks
        self.first = first  # index of the first block that is held: those before have left the window

    @property
    def held(self) -> list[int]:
        return self.blocks[self.first :]


class Sequence:
    """Tokens, counts, block table and row of one completion.

    Three lengths that are easily confused:
      num_tokens           tokens whose value the host knows (prompt and generated)
      num_computed_tokens  positions whose KV is computed or launched, proposed tokens not counted; if it is not
                           smaller than `num_tokens`, a sampled token is still in flight
      num_cached_tokens    prompt positions that were found in the prefix cache when the sequence first ran
    """

    __slots__ = (
        "arrival",
        "bad_words",
        "block_keys",
        "block_tables",
        "cache_salt",
        "check_at",
        "event_at",
        "extras",
        "finish_reason",
        "followers",
        "guide",
        "index",
        "logprobs",
        "max_num_tokens",
        "num_cached_blocks",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "params",
        "pooled",
        "pooling",
        "prefix",
        "priority",
        "prompt_logprobs",
        "redo_from",
        "request_id",
        "row",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
        "was_verified",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        *,
        max_num_tokens: int,
        stop_token_ids: frozenset[int] = frozenset(),
        index: int = 0,
        seed: int = 0,
        priority: int = 0,
        arrival: int = 0,
        cache_salt: str | None = None,
        bad_words: tuple[tuple[int, ...], ...] = (),
        guide: "Guide | None" = None,
        pooling: str | None = None,
    ) -> None:
        self.request_id = request_id
        self.index = index
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(prompt_token_ids)
        self.max_num_tokens = max_num_tokens  # prompt and completion together
        self.params = params
        self.seed = seed
        self.stop_token_ids = stop_token_ids
        self.bad_words = bad_words
        self.guide = guide
        self.pooling = pooling  # "last" or "mean": the sequence ends with one vector for its prompt, without new tokens
        self.priority = priority  # smaller runs first
        self.arrival = arrival
        self.cache_salt = cache_salt
        # what the content of its blocks depends on beside the tokens, as block digests read it
        self.extras = NO_EXTRAS if cache_salt is None else encode_extras(("cache_salt", cache_salt))
        self.followers: list[Sequence] = []  # completions of the same prompt that wait until it is in the prefix cache

        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.row = 0  # of the device tables while running; 0 is the padding row
        self.block_tables: list[BlockTable] = []  # one per paged group while running
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.was_verified = False  # the last step of its row verified proposed tokens
        self.redo_from: int | None = None  # where that step started, if rejected tokens are in the state of its row
        # the full blocks known to the prefix cache: how many, and the last of them, while running
        self.num_cached_blocks = 0
        self.prefix: PrefixNode
        self.block_keys: list[BlockKey] = []  # of its first full blocks, as far as they were looked up
        # `num_computed_tokens` from which schedule() must look at it (new block, length reached), and `num_tokens` from
        # which update() must (block full, length reached): one comparison each per step
        self.event_at = 0
        self.check_at = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.pooled: list[float] = []

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
