"""The token oracle: a fake device whose tokens are hashes of everything it reads through the block table.

The fake model has a KV cache like a real one: the entry of a position holds the position, the token and a digest of all
entries that the position reads. So a block with the right tokens after the wrong prefix differs, as in a transformer.
Each group of layers has its own entries and reads those in its window. A wrong slot, a stale table, a wrong start, a
missing block, a freed block or a block overwritten by another sequence raises an error or changes the tokens. `answer`
computes the right tokens without an engine.
"""

import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.core import EngineCore
from nanovllm.engine.prefix import Digest, blake2b_256
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.errors import RequestError
from nanovllm.plan import NewRow, RowStep, StepPlan, StepResult, TokenLogprobs

from .oracle_model import (
    MAX_GUESSES,
    NOTHING_READ,
    VOCABULARY,
    Answer,
    Content,
    Request,
    all_of,
    answer,
    before,
    entry_state,
    mix,
    pool,
    sample,
    score,
)
from .scheduler_steps import num_sampled_rows


def table_of(seq: Sequence, group: int = 0) -> list[int]:
    """The blocks of a sequence in one group; none while it does not run."""
    return seq.block_tables[group].blocks if seq.block_tables else []


# --- the fake device -------------------------------------------------------------------------------------------------


class Entry(NamedTuple):
    """One slot of the fake KV cache, and the sequence that wrote it."""

    position: int
    token: int
    state: int
    tenant: str | None
    step: int
    row: int


@dataclass
class Row:
    """A row of the device tables."""

    new: NewRow
    tenant: str | None
    tokens: list[int] = field(init=False)
    blocks: list[list[int]] = field(init=False)  # by group
    verified: bool = False  # the next plan says how many of the tokens were kept
    num_pooled: int = 0  # positions whose sum is `total`
    total: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = list(self.new.token_ids)
        self.blocks = [list(blocks) for blocks in self.new.block_tables]


class FakeHandle:
    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run = run

    def wait(self) -> StepResult:
        return self._run()


class FakeExecutor:
    """An executor without a device. Eager: a step runs when it is launched; lazy: when it is waited for."""

    runs_beside_host = True

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        lazy: bool = False,
        tenant_of: Callable[[int], str | None] = lambda row: None,
        held_by: Callable[[int], list[list[int]]] | None = None,
        max_guesses: int = 0,
    ) -> None:
        self._max_guesses = max_guesses
        self.num_blocks = config.num_blocks
        self.num_launched = 0
        self.num_run = 0
        self.num_verified = 0  # proposed tokens
        self.num_right = 0
        self._config = config
        self._lazy = lazy
        # the salt of a row and the blocks it holds in each group, asked at launch; the plan does not carry them
        self._tenant_of, self._held_by = tenant_of, held_by
        self._held: dict[int, list[list[int]]] = {}  # by row, of the step that runs
        self._windows = tuple(group.window for group in config.groups)
        self._rows: dict[int, Row] = {}
        self._slots: list[list[list[Entry | None]]] = [
            [[None] * config.block_size for _ in range(group.num_blocks)] for group in config.groups
        ]

    def launch(self, plan: StepPlan) -> FakeHandle:
        self._check(plan)
        self.num_launched += 1
        number = self.num_launched
        tenants = {new.row: self._tenant_of(new.row) for new in plan.new_rows}
        held = self._check_held(plan)
        if self._lazy:
            return FakeHandle(lambda: self._run(number, plan, tenants, held))
        result = self._run(number, plan, tenants, held)
        return FakeHandle(lambda: result)

    def close(self) -> None:
        pass

    def _check(self, plan: StepPlan) -> None:
        rows = [*plan.decode_rows, *(step.row for step in plan.row_steps)]
        assert rows, "a step with zero tokens"
        assert len(set(rows)) == len(rows), "a row appears twice in a step"
        assert len(rows) <= self._config.max_num_seqs, "more rows than max_num_seqs"
        assert all(1 <= row <= self._config.max_num_seqs for row in rows), "a row outside the tables, or padding"
        assert all(step.num_new > 0 for step in plan.row_steps), "a row step without tokens"
        for step in plan.row_steps:
            assert not step.proposed or step.num_sampled == 1 + len(step.proposed), step
        assert plan.num_tokens <= self._config.max_num_batched_tokens, "more tokens than the budget"
        assert {new.row for new in plan.new_rows} <= {step.row for step in plan.row_steps}, "a new row does not run"

    def _check_held(self, plan: StepPlan) -> dict[int, list[list[int]]]:
        """The blocks that each row of the step holds: no more than its windows and its new tokens touch."""
        if self._held_by is None:
            return {}
        num_new = dict.fromkeys(plan.decode_rows, 1) | {step.row: step.num_new for step in plan.row_steps}
        held = {row: self._held_by(row) for row in num_new}
        for row, groups in held.items():
            for window, blocks in zip(self._windows, groups, strict=True):
                if window is not None:
                    # blocks of rejected tokens are kept for the next ones
                    num_touched = num_new[row] + self._max_guesses
                    most = -(-(window + num_touched - 2) // self._config.block_size) + 1
                    assert len(blocks) <= most, f"row {row} holds {len(blocks)} blocks; {most} are enough"
        return held

    def _run(
        self, number: int, plan: StepPlan, tenants: dict[int, str | None], held: dict[int, list[list[int]]]
    ) -> StepResult:
        assert number == self.num_run + 1, "steps must be waited for once and in order"
        self.num_run, self._held = number, held
        for new in plan.new_rows:
            self._rows[new.row] = Row(new, tenants[new.row])
        for blocks in plan.new_blocks:
            table = self._rows[blocks.row].blocks[blocks.group]
            assert blocks.index == len(table), "new blocks do not continue the table"
            table.extend(blocks.blocks)
        result = StepResult()
        for row in plan.decode_rows:
            assert not self._rows[row].verified, "the device cannot know the length of a verified row"
            last = len(self._rows[row].tokens) - 1
            self._forward(RowStep(row, start=last, num_new=1, num_sampled=1), result)
        for step in plan.row_steps:
            self._forward(step, result)
        assert len(result.tokens) == num_sampled_rows(plan)
        return result

    def _forward(self, step: RowStep, result: StepResult) -> None:
        row = self._rows[step.row]
        end = step.start + step.num_new
        if row.verified:
            del row.tokens[step.num_known :]
        row.verified = bool(step.proposed)
        assert step.num_known <= len(row.tokens), "a step beyond the known tokens"
        is_last = step.num_known == len(row.tokens)
        assert bool(step.num_sampled) == (is_last and step.pooling is None), "samples elsewhere than at the last token"
        assert end < self._config.max_model_len + (step.pooling is not None), "no room for the next token in the tables"
        row.tokens += step.proposed
        groups = range(len(self._windows))
        after = [NOTHING_READ] * len(groups)
        for group in groups:
            if self._windows[group] is None:
                for position in range(step.start):
                    after[group] = mix(after[group], *self._read(step.row, group, position))
        scores: list[TokenLogprobs] = []
        sampled: list[tuple[int, int]] = []  # (what was read, the token that follows)
        for position in range(step.start, end):
            seen = before(position, self._windows, after, lambda group, earlier: self._read(step.row, group, earlier))
            for group in groups:
                self._write(all_of(seen), step.row, group, position)
            after = [mix(seen[group], *self._read(step.row, group, position)) for group in groups]
            read = all_of(after)
            row.total += pool(read)
            row.num_pooled += 1
            if step.num_prompt_logprobs is not None and position + 1 < row.new.num_prompt_tokens:
                scores.append(score(read, row.tokens[position + 1], step.num_prompt_logprobs))
            if position >= end - step.num_sampled:
                sampled.append((read, self._sample(read, row, num_tokens=position + 1)))
        if step.num_prompt_logprobs is not None:
            result.prompt_logprobs[step.row] = scores
        if step.num_sampled:
            self._keep(step, row, sampled, result)
        if step.pooling is not None and is_last:
            assert step.pooling == "last" or row.num_pooled == end, "a mean without some of its positions"
            result.pooled[step.row] = [pool(read) if step.pooling == "last" else row.total]

    def _sample(self, read: int, row: Row, *, num_tokens: int) -> int:
        return sample(
            read,
            seed=row.new.seed,
            num_completion_tokens=num_tokens - row.new.num_prompt_tokens,
            min_tokens=row.new.params.min_tokens,
            stop_token_ids=row.new.stop_token_ids,
        )

    def _keep(self, step: RowStep, row: Row, sampled: list[tuple[int, int]], result: StepResult) -> None:
        """The sampled tokens up to the first one that was not proposed; the table has all of them."""
        row.tokens[step.num_known :] = [token for _, token in sampled]
        num_right = 0
        while num_right < len(step.proposed) and step.proposed[num_right] == sampled[num_right][1]:
            num_right += 1
        kept = sampled[: num_right + 1]
        if row.new.params.logprobs is not None:
            result.logprobs[len(result.tokens)] = [score(read, token, row.new.params.logprobs) for read, token in kept]
        result.tokens.append([token for _, token in kept])
        self.num_verified += len(step.proposed)
        self.num_right += num_right

    def _slot(self, number: int, group: int, position: int) -> tuple[int, int]:
        block = self._rows[number].blocks[group][position // self._config.block_size]
        if self._held:
            assert block in self._held[number][group], f"row {number} uses a freed block for position {position}"
        return block, position % self._config.block_size

    def _write(self, read: int, number: int, group: int, position: int) -> None:
        row = self._rows[number]
        block, offset = self._slot(number, group, position)
        token = row.tokens[position]
        state = entry_state(read, position, token)
        self._slots[group][block][offset] = Entry(position, token, state, row.tenant, self.num_run, number)

    def _read(self, number: int, group: int, position: int) -> Content:
        row = self._rows[number]
        block, offset = self._slot(number, group, position)
        entry = self._slots[group][block][offset]
        assert entry is not None, f"row {number} reads position {position} from a slot never written"
        assert (entry.position, entry.token) == (position, row.tokens[position]), (
            f"row {number} reads position {position} and finds {entry}"
        )
        assert entry.tenant == row.tenant, f"row {number} reads another tenant's KV at position {position}"
        assert entry.row == number or entry.step < self.num_run, f"row {number} reads what this very step computes"
        return entry.position, entry.token, entry.state


# --- the engine under test, watched -----------------------------------------------------------------------------------


class RandomPacer:
    def __init__(self, random: random.Random) -> None:
        self._random = random

    def num_prompt_tokens(self, *, num_decodes: int, num_waiting: int) -> int:
        return self._random.randint(0, 12)

    def clock(self, scheduler: Scheduler, *, beside_host: bool) -> None:
        """Nothing is measured."""


class Harness:
    """An EngineCore with the fake device. After every operation all checks run.

    With `guesses`, a row gets 1 to 5 tokens in a step: up to 4 are proposed, of which a random number is right.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        depth: int = 0,
        lazy: bool = False,
        digest: Digest = blake2b_256,
        guesses: random.Random | None = None,
        pools: bool = True,  # whether random requests may be for a pooled vector
        pacing: random.Random | None = None,  # prompts are computed in chunks of random sizes while others decode
    ) -> None:
        self.config = config
        self.pools = pools
        self._guesses = guesses
        self.block_manager = BlockManager(
            groups=config.groups,
            block_size=config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            digest=digest,
        )
        self.scheduler = Scheduler(
            config,
            self.block_manager,
            proposer=None if guesses is None else self,
            pacer=None if pacing is None else RandomPacer(pacing),
        )
        self.device = FakeExecutor(
            config,
            lazy=lazy,
            tenant_of=self._tenant_of,
            held_by=self._held_by,
            max_guesses=0 if guesses is None else MAX_GUESSES,
        )
        self.core = EngineCore(self.scheduler, self.device, depth=depth)
        self.requests: list[Request] = []
        self.sequences: list[tuple[Sequence, Answer]] = []
        self.ended: deque[Sequence] = deque()
        self.aborted: set[Sequence] = set()

    def _tenant_of(self, row: int) -> str | None:
        return next(seq.cache_salt for seq in self.scheduler.running if seq.row == row)

    def _held_by(self, row: int) -> list[list[int]]:
        return next([table.held for table in seq.block_tables] for seq in self.scheduler.running if seq.row == row)

    def propose(self, token_ids: Seq[int], max_tokens: int) -> list[int]:
        assert self._guesses is not None and max_tokens > 0
        seq, expected = next((seq, expected) for seq, expected in self.sequences if seq.token_ids is token_ids)
        guesses = expected.token_ids[seq.num_completion_tokens :][: self._guesses.randint(0, MAX_GUESSES)]
        while len(guesses) < self._guesses.randint(0, MAX_GUESSES):
            guesses.append(self._guesses.randrange(VOCABULARY))
        return guesses

    def add(self, request: Request) -> bool:
        """False if the request was refused; checks that it had to be."""
        sequences = request.sequences(len(self.requests), self.config)
        try:
            self.scheduler.add(sequences[0])
        except RequestError:
            assert not request.fits(self.config), f"refused although it fits: {request}"
            return False
        assert request.fits(self.config), f"accepted although it can never run: {request}"
        self.requests.append(request)
        self.sequences += [(seq, answer(request, seq.index, self.config)) for seq in sequences]
        check_scheduler(self.scheduler)
        return True

    def step(self) -> None:
        had_work = self.core.has_work
        before = (self.device.num_launched, self.device.num_run)
        self._take_in(self.core.step())
        moved = before != (self.device.num_launched, self.device.num_run) or self.core.last_plan is not None
        assert moved or not had_work, "there is work, but nothing is launched and nothing comes back"

    def drain(self) -> None:
        """Wait for all steps in flight and launch none, so that every running sequence may be preempted."""
        while self.core._pending:
            plan, handle = self.core._pending.popleft()
            self._take_in(self.scheduler.update(plan, handle.wait()))

    def abort_targets(self) -> list[int]:
        """Numbers of sequences in every state: running, waiting, following another sequence, ended."""
        return [i for i, (seq, _) in enumerate(self.sequences) if seq.row or i >= len(self.sequences) - 3]

    def abort(self, number: int) -> None:
        seq, _ = self.sequences[number]
        if not seq.finished:
            self.aborted.add(seq)
        self.scheduler.abort(seq)
        check_scheduler(self.scheduler)

    def preempt(self, number: int) -> None:
        """Any running sequence without a token in flight."""
        targets = [seq for seq in self.scheduler.running if not seq.has_token_in_flight]
        if targets:
            self.scheduler.preempt(targets[number % len(targets)])
            check_scheduler(self.scheduler)

    def reset_prefix_cache(self) -> None:
        self.block_manager.reset_prefix_cache()
        check_scheduler(self.scheduler)

    def _take_in(self, ended: list[Sequence]) -> None:
        check_scheduler(self.scheduler)
        self.ended += ended
        for seq, expected in self.sequences:
            if seq.status is SequenceStatus.RUNNING:
                count = seq.num_completion_tokens
                assert seq.completion_token_ids == expected.token_ids[:count], f"wrong tokens so far: {seq}"

    def run_to_end(self) -> None:
        """Run until all sequences end. The oldest always advances, so the number of steps is bounded."""
        limit = sum(3 * seq.max_num_tokens + 8 for seq, _ in self.sequences if not seq.finished) + 8
        for _ in range(limit):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, f"not done after {limit} steps"
        self._check_end()

    def _check_end(self) -> None:
        assert self.block_manager.num_available == self.config.num_blocks, "a block leaks"
        assert not self.scheduler.waiting and not self.scheduler.running
        assert self.device.num_run == self.device.num_launched
        unended = {seq for seq, _ in self.sequences} - self.aborted
        assert len(self.ended) == len(unended) and set(self.ended) == unended, "not every end was told exactly once"
        for seq, expected in self.sequences:
            self._check_answer(seq, expected)

    def _check_answer(self, seq: Sequence, expected: Answer) -> None:
        assert seq.finished and not seq.followers
        assert seq.num_cached_tokens % self.config.block_size == 0 and seq.num_cached_tokens < seq.num_prompt_tokens
        if not self.config.enable_prefix_caching or seq.params.prompt_logprobs is not None:
            assert seq.num_cached_tokens == 0
        got = Answer(
            seq.completion_token_ids,
            str(seq.finish_reason),
            seq.stop_reason,
            seq.logprobs,
            seq.prompt_logprobs,
            seq.pooled,
        )
        if seq in self.aborted:
            count = seq.num_completion_tokens
            assert (got.finish_reason, got.stop_reason) == ("abort", None)
            assert got.token_ids == expected.token_ids[:count] and got.logprobs == expected.logprobs[:count]
            assert got.prompt_logprobs == expected.prompt_logprobs[: len(got.prompt_logprobs)]
        else:
            assert got == expected, f"{seq}: {got} instead of {expected}"
