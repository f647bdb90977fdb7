"""One completion of one prompt: the host's truth about it."""

from collections.abc import Sequence as Seq
from enum import Enum, auto
from typing import Protocol

from nanovllm.engine.prefix import NO_EXTRAS, PrefixNode, encode_extras
from nanovllm.plan import TokenLogprobs
from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Guide(Protocol):
    """Says which tokens may come next in a completion that must have a given form."""

    @property
    def num_tokens(self) -> int:
        """Of the completion, already followed."""
        ...

    def mask_after(self, new_tokens: Seq[int]) -> bytes | None:
        """A bit a token, low bits first, of what may come behind these; None if that cannot be said any more."""
        ...


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
      num_computed_tokens  positions whose KV is computed or already launched; it runs ahead of the host, so
                           `num_computed_tokens >= num_tokens` says that a sampled token is still in flight
      num_cached_tokens    prompt positions that were found in the prefix cache when the sequence first ran
    """

    __slots__ = (
        "arrival",
        "bad_words",
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
        "prefix",
        "priority",
        "prompt_logprobs",
        "request_id",
        "row",
        "seed",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
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
        guide: Guide | None = None,
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
        self.priority = priority  # smaller runs first
        self.arrival = arrival
        self.cache_salt = cache_salt
        # what the content of its blocks depends on beside the tokens, as block digests read it
        self.extras = NO_EXTRAS if cache_salt is None else encode_extras(("cache_salt", cache_salt))
        self.followers: list[Sequence] = []  # siblings that wait for this one's prompt to be in the cache

        self.status = SequenceStatus.WAITING
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.row = 0  # of the device tables while running; 0 is the padding row
        self.block_tables: list[BlockTable] = []  # one per paged group while running
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        # the full blocks known to the prefix cache: how many, and the last of them, while running
        self.num_cached_blocks = 0
        self.prefix: PrefixNode
        # `num_computed_tokens` at which scheduling needs a look (new block, length reached), and `num_tokens` at
        # which updating does (block full, length reached): one comparison a step each
        self.event_at = 0
        self.check_at = 0
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] = []

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
    def order(self) -> tuple[int, int, int]:
        """Who goes first, and who is preempted last."""
        return (self.priority, self.arrival, self.index)

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}.{self.index}, {self.status.name.lower()}, {self.num_prompt_tokens} prompt + "
            f"{self.num_completion_tokens} new tokens, {self.num_computed_tokens} computed, row {self.row})"
        )
