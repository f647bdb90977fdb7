"""The model of the token oracle: pure functions, requests, and the answer to a request computed without an engine."""

from collections.abc import Callable
from dataclasses import dataclass, field

from nanovllm.config import SchedulerConfig
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import TokenLogprobs
from nanovllm.sampling_params import SamplingParams

VOCABULARY = 4  # small, so that stop tokens and equal continuations occur
NOTHING_READ = 0
MAX_GUESSES = 4  # proposed tokens of a row in a step

# --- the model: pure functions --------------------------------------------------------------------------------------


def mix(*values: int) -> int:
    digest = 0x9E3779B97F4A7C15
    for value in values:
        digest = ((digest ^ value) * 0xBF58476D1CE4E5B9 + 0x94D049BB133111EB) & (2**64 - 1)
        digest ^= digest >> 29
    return digest


def entry_state(read: int, position: int, token: int) -> int:
    """The third part of a position's KV entry, after position and token: a digest of the entries before it."""
    return mix(1, read, position, token)


Content = tuple[int, int, int]  # of a KV entry: position, token, state
Windows = tuple[int | None, ...]  # one per group


def before(position: int, windows: Windows, after: list[int], entry: Callable[[int, int], Content]) -> list[int]:
    """By group, a digest of what a position reads of earlier ones. `after`: the same after the position before it."""
    digests = []
    for group, window in enumerate(windows):
        digest = after[group]
        if window is not None:
            digest = NOTHING_READ
            for earlier in range(max(0, position - window + 1), position):
                digest = mix(digest, *entry(group, earlier))
        digests.append(digest)
    return digests


def all_of(digests: list[int]) -> int:
    return digests[0] if len(digests) == 1 else mix(*digests)


def sample(
    read: int, *, seed: int, num_completion_tokens: int, min_tokens: int, stop_token_ids: tuple[int, ...]
) -> int:
    """The token after the entries that were read; no stop token before `min_tokens`."""
    token = mix(2, read, seed) % VOCABULARY
    while num_completion_tokens < min_tokens and token in stop_token_ids:
        token = (token + 1) % VOCABULARY
    return token


def score(read: int, chosen: int, num_alternatives: int) -> TokenLogprobs:
    token_ids = (chosen, *(mix(3, read, i) % VOCABULARY for i in range(num_alternatives)))
    return TokenLogprobs(
        token_ids, tuple(-float(mix(4, read, t) % 997) for t in token_ids), rank=mix(5, read, chosen) % 9
    )


def pool(read: int) -> float:
    """What a position adds to a pooled vector."""
    return float(mix(6, read) % 997)


# --- a request, and its answer computed alone ------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Request:
    prompt: tuple[int, ...]
    max_tokens: int | None = 4  # None: as many as the cache and max_model_len allow
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    seeds: tuple[int, ...] = (0,)  # one for each completion
    priority: int = 0
    salt: str | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    pooling: str | None = None

    def max_num_tokens(self, config: SchedulerConfig) -> int:
        if self.pooling is not None:
            return len(self.prompt)
        if self.max_tokens is None:
            room = [n for n in range(1, config.max_model_len + 1) if blocks_suffice(n - 1, config)]
            return max(room)
        return min(len(self.prompt) + self.max_tokens, config.max_model_len)

    def fits(self, config: SchedulerConfig) -> bool:
        """Whether the request can run alone in an empty cache: every token but the last needs a slot."""
        num_computed = max(len(self.prompt), self.max_num_tokens(config) - 1)
        longest = config.max_model_len - (self.pooling is None)
        return 0 < len(self.prompt) <= longest and blocks_suffice(num_computed, config)

    def sequences(self, number: int, config: SchedulerConfig) -> list[Sequence]:
        """The first sequence, with the other completions as its followers."""
        params = SamplingParams(
            n=len(self.seeds),
            max_tokens=self.max_tokens,
            min_tokens=self.min_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )
        leader, *followers = [
            Sequence(
                f"request-{number}",
                list(self.prompt),
                params,
                max_num_tokens=self.max_num_tokens(config),
                stop_token_ids=frozenset(self.stop_token_ids),
                index=index,
                seed=seed,
                priority=self.priority,
                arrival=number,
                cache_salt=self.salt,
                pooling=self.pooling,
            )
            for index, seed in enumerate(self.seeds)
        ]
        leader.followers = followers
        return [leader, *followers]


def blocks_suffice(num_computed: int, config: SchedulerConfig) -> bool:
    """Whether every group has blocks for what each of these positions reads."""
    size = config.block_size
    for group in config.groups:
        for position in range(num_computed):
            first = 0 if group.window is None else max(0, position - group.window + 1)
            if position // size - first // size + 1 > group.num_blocks:
                return False
    return True


@dataclass(frozen=True)
class Answer:
    token_ids: list[int]
    finish_reason: str
    stop_reason: int | None
    logprobs: list[TokenLogprobs]
    prompt_logprobs: list[TokenLogprobs]
    pooled: list[float] = field(default_factory=list)


def answer(request: Request, index: int, config: SchedulerConfig) -> Answer:
    """The right tokens of completion `index`, computed with the model's functions alone."""
    token_ids = list(request.prompt)
    num_prompt_tokens = len(token_ids)
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    windows = tuple(group.window for group in config.groups)
    entries: list[Content] = []
    after = [NOTHING_READ] * len(windows)
    total = 0.0
    for position in range(request.max_num_tokens(config)):
        seen = before(position, windows, after, lambda group, earlier: entries[earlier])
        entries.append((position, token_ids[position], entry_state(all_of(seen), position, token_ids[position])))
        after = [mix(digest, *entries[position]) for digest in seen]
        read = all_of(after)
        total += pool(read)
        if request.pooling is not None:
            if position + 1 == num_prompt_tokens:
                return Answer([], "stop", None, [], [], [pool(read) if request.pooling == "last" else total])
            continue
        if position + 1 < num_prompt_tokens:
            if request.prompt_logprobs is not None:
                prompt_logprobs.append(score(read, token_ids[position + 1], request.prompt_logprobs))
            continue
        token = sample(
            read,
            seed=request.seeds[index],
            num_completion_tokens=len(token_ids) - num_prompt_tokens,
            min_tokens=request.min_tokens,
            stop_token_ids=request.stop_token_ids,
        )
        token_ids.append(token)
        if request.logprobs is not None:
            logprobs.append(score(read, token, request.logprobs))
        if token in request.stop_token_ids:
            return Answer(token_ids[num_prompt_tokens:], "stop", token, logprobs, prompt_logprobs)
        if len(token_ids) == request.max_num_tokens(config):
            return Answer(token_ids[num_prompt_tokens:], "length", None, logprobs, prompt_logprobs)
    raise AssertionError("a request ends by its length at the latest")
