"""Which sequences run in the next step: continuous batching under a token budget, from lengths alone.

In every step, first each decoding sequence advances by one token (or, with a proposer, verifies several), then prompt
chunks fill what is left of the budget, then waiting sequences are admitted. If there are no free blocks, the newest
sequence is preempted: its blocks are freed, it returns to the head of the queue and is computed again later, mostly
from the prefix cache. The oldest sequence is never preempted for another one, so it always advances and every request
finishes.

Two rules make it safe to schedule a step before the tokens of the last one are known: a token that arrives for a
finished sequence is dropped, and a sequence with a token in flight is never preempted: it rests for one step and is
preempted then.
"""

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.plan import NewBlocks, NewRow, RowStep, StepPlan, StepResult

if TYPE_CHECKING:
    from nanovllm.engine.pacer import Pacer
    from nanovllm.engine.proposer import Proposer


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A RowStep and its sequence."""

    seq: Sequence
    step: RowStep
    num_preemptions: int  # of the sequence when this was scheduled: a later preemption makes the result worthless


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan and the sequences of its rows, kept until its result comes."""

    plan: StepPlan
    decodes: tuple[Sequence, ...]  # of plan.decode_rows
    rows: tuple[ScheduledRow, ...] = ()  # of plan.row_steps


class Scheduler:
    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager | None = None,
        *,
        proposer: "Proposer | None" = None,
        pacer: "Pacer | None" = None,
    ) -> None:
        self.config = config
        self.pacer = pacer  # limits the prompt tokens of a step in which sequences decode
        self.proposer = proposer
        if block_manager is None and config.keeps_row_state and config.enable_prefix_caching:
            from nanovllm.engine.checkpoints import CheckpointedBlocks

            block_manager = CheckpointedBlocks(config)
        self.block_manager = block_manager or BlockManager(
            groups=config.groups, block_size=config.block_size, enable_prefix_caching=config.enable_prefix_caching
        )
        self._proposals = None
        if proposer is not None:
            from nanovllm.engine.proposals import Proposals

            self._proposals = Proposals(proposer, self.block_manager, max_num_tokens=config.max_num_batched_tokens)
        self.waiting: list[Sequence] = []  # each of these lists is kept in Sequence.order
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []  # all known tokens are computed or launched
        self.num_preemptions = 0
        self._num_guided = 0  # running sequences with a guide
        self._rows = list(range(config.max_num_seqs, 0, -1))  # free rows of the device tables
        self._decode_rows: tuple[int, ...] = ()  # of the last step that was not a repetition
        self.in_flight: deque[ScheduledStep] = deque()
        self._steady: ScheduledStep | None = None  # the step that repeats while nothing changes
        self.num_masks: dict[Sequence, int] = {}  # of guided verifications in flight: how many tokens may be kept

    # --- requests come and go -----------------------------------------------------------------------------------------

    def add(self, seq: Sequence) -> None:
        """Queue a sequence, or refuse one that could never run."""
        config = self.config
        # the last token's KV is never computed, but all of the prompt's is
        num_computed = max(seq.num_tokens, seq.max_num_tokens - 1)
        fits = all(group.blocks_needed(num_computed, config.block_size) <= group.num_blocks for group in config.groups)
        if not fits or not 0 < seq.num_tokens < config.max_model_len + (seq.pooling is not None):
            from nanovllm.engine.refusal import refusal

            raise refusal(seq, num_computed, config)
        insort(self.waiting, seq, key=lambda seq: seq.order)

    def abort(self, seq: Sequence) -> None:
        """End a sequence now, wherever it is. Harmless for one that has ended."""
        if not seq.finished:
            self.finish(seq, "abort")

    def finish(self, seq: Sequence, reason: str, stop_reason: int | str | None = None) -> None:
        if seq.status is SequenceStatus.RUNNING:
            self._leave_running(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        self._release_followers(seq)

    @property
    def running(self) -> list[Sequence]:
        return self.decoding + self.prefilling

    @property
    def num_unfinished(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)

    # --- schedule -----------------------------------------------------------------------------------------------------

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can be launched before a result has come back."""
        at_event = [seq for seq in self.decoding if seq.num_computed_tokens >= seq.event_at]
        idle = not self.prefilling and (not self.waiting or not self._rows)
        if self._steady is not None and not at_event and idle:
            self._advance(self.decoding, 1)
            self.in_flight.append(self._steady)
            return self._steady.plan

        num_preemptions = self.num_preemptions
        if self.block_manager.extends_chunks and self.prefilling:  # whose blocks are allocated chunk by chunk
            at_event += [seq for seq in self.prefilling if not self.block_manager.is_covered(seq)]
            at_event.sort(key=lambda seq: seq.order)
        resting, new_blocks = self._handle_events(at_event)
        decodes = tuple(seq for seq in self.decoding if seq not in resting) if resting else tuple(self.decoding)
        advancing = decodes
        budget = self.config.max_num_batched_tokens
        rows: list[ScheduledRow] = []
        if self._proposals is not None:
            decodes, verified = self._proposals.choose(advancing, new_blocks)
            for seq in advancing:
                self._set_event(seq)
            rows = [ScheduledRow(seq, step, seq.num_preemptions) for seq, step in verified]
            self._advance([row.seq for row in rows], 1)
            budget -= sum([row.step.num_new for row in rows])
        budget -= len(decodes)
        num_waiting = len(self.prefilling) + len(self.waiting)
        if self.pacer is not None and advancing and num_waiting:
            most = self.pacer.num_prompt_tokens(num_decodes=len(advancing), num_waiting=num_waiting)
            budget = min(budget, most)
        self._advance(decodes, 1)
        may_admit = num_preemptions == self.num_preemptions or not (decodes or rows)
        chunks, new_rows = self._prefill(budget=budget, may_admit=may_admit, resting=resting, new_blocks=new_blocks)
        rows += chunks
        if not decodes and not rows:
            return None
        decode_rows = tuple([seq.row for seq in decodes])
        if decode_rows != self._decode_rows:  # else the very same tuple says that the device knows them
            self._decode_rows = decode_rows
        guided = [seq.row for seq in _sampled(decodes, rows) if seq.guide is not None] if self._num_guided else []
        step = ScheduledStep(
            plan=StepPlan(
                decode_rows=self._decode_rows,
                row_steps=tuple([row.step for row in rows]),
                new_rows=tuple(new_rows),
                new_blocks=tuple(new_blocks),
                state_copies=tuple(self.block_manager.state_copies),
                guided_rows=tuple(guided),
            ),
            decodes=decodes,
            rows=tuple(rows),
        )
        self.block_manager.state_copies.clear()
        self._steady = None
        if not rows and not resting and self.proposer is None:
            repeated = replace(step.plan, new_blocks=(), state_copies=())
            self._steady = step if repeated == step.plan else ScheduledStep(repeated, decodes)
        self.in_flight.append(step)
        return step.plan

    def _handle_events(self, at_event: list[Sequence]) -> tuple[set[Sequence], list[NewBlocks]]:
        """Handle sequences that need a block or whose last token is in flight. Returns the sequences that rest in this
        step, and the blocks that the others were given."""
        resting: set[Sequence] = set()
        new_blocks: list[NewBlocks] = []
        if self.proposer is not None:  # proposals continue known tokens
            resting.update([seq for seq in self.decoding if seq.has_token_in_flight])
        for seq in at_event:
            if seq.status is not SequenceStatus.RUNNING or seq in resting:
                continue  # preempted for an older one just now, or waits: the step that reports its blocks may not run
            if seq.num_computed_tokens >= seq.max_num_tokens - 1 and seq.has_token_in_flight:
                resting.add(seq)  # its last token is in flight
            else:
                new_blocks += self._grow(seq, resting)
        return {seq for seq in resting if seq.status is SequenceStatus.RUNNING}, new_blocks

    def _grow(self, seq: Sequence, resting: set[Sequence]) -> list[NewBlocks]:
        """Give `seq` blocks for its next token, preempting the newest sequences for them if there are none."""
        while (new_blocks := self.block_manager.append(seq)) is None:
            victim = max(self.running, key=lambda seq: seq.order)
            if victim.has_token_in_flight:
                resting.update((victim, seq))
                return []
            self.preempt(victim)
            if victim is seq:
                return []
        self._set_event(seq)
        return new_blocks

    def preempt(self, seq: Sequence) -> None:
        """Return a running sequence to the queue. It starts again from its known tokens."""
        assert not seq.has_token_in_flight
        self._leave_running(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        if len(seq.prompt_logprobs) < seq.num_prompt_tokens - 1:
            seq.prompt_logprobs = []
        insort(self.waiting, seq, key=lambda seq: seq.order)

    def _prefill(
        self, *, budget: int, may_admit: bool, resting: set[Sequence], new_blocks: list[NewBlocks]
    ) -> tuple[list[ScheduledRow], list[NewRow]]:
        """Chunks of running sequences and of those that are admitted; their blocks are added to `new_blocks`."""
        chunks: list[ScheduledRow] = []
        new_rows: list[NewRow] = []
        for seq in list(self.prefilling):
            if budget and seq not in resting:
                chunks.append(self._chunk(seq, budget, new_blocks))
                budget -= chunks[-1].step.num_new
        while budget and may_admit and self.waiting and self._rows and self.block_manager.allocate(self.waiting[0]):
            seq = self.waiting.pop(0)
            self._admit(seq)
            chunks.append(self._chunk(seq, budget, []))  # its new row names all its blocks
            new_rows.append(self._new_row(seq))
            budget -= chunks[-1].step.num_new
        return chunks, new_rows

    def _admit(self, seq: Sequence) -> None:
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens
        seq.status = SequenceStatus.RUNNING
        seq.row = self._rows.pop()
        seq.was_verified, seq.redo_from = False, None
        self._num_guided += seq.guide is not None
        self._set_check(seq)
        insort(self.prefilling, seq, key=lambda seq: seq.order)

    def _new_row(self, seq: Sequence) -> NewRow:
        return NewRow(
            row=seq.row,
            token_ids=tuple(seq.token_ids),
            num_prompt_tokens=seq.num_prompt_tokens,
            block_tables=tuple([tuple(table.blocks) for table in seq.block_tables]),
            params=seq.params,
            seed=seq.seed,
            stop_token_ids=tuple(sorted(seq.stop_token_ids)),
            bad_words=seq.bad_words,
        )

    def _chunk(self, seq: Sequence, budget: int, new_blocks: list[NewBlocks]) -> ScheduledRow:
        """Schedule as many uncomputed tokens as budget and blocks allow. With the last one it starts to decode. Its new
        blocks are added to `new_blocks`."""
        start = seq.num_computed_tokens
        num_new = min(seq.num_tokens - start, budget)
        if self.block_manager.extends_chunks:  # else all blocks were allocated when the sequence was admitted
            end, blocks = self.block_manager.extend(seq, start + num_new)
            new_blocks += blocks
            num_new = end - start
        self._advance((seq,), num_new)
        is_last = seq.num_computed_tokens == seq.num_tokens
        if is_last:
            self._set_event(seq)
            if self.block_manager.extends_chunks:
                seq.event_at = seq.num_computed_tokens  # the next step frees what has left the windows with this chunk
            self.prefilling.remove(seq)
            insort(self.decoding, seq, key=lambda seq: seq.order)
        unscored = len(seq.prompt_logprobs) < seq.num_prompt_tokens - 1
        num_prompt_logprobs = seq.params.prompt_logprobs if unscored else None
        num_sampled = int(is_last and seq.pooling is None)
        step = RowStep(
            seq.row, start, num_new, num_sampled, pooling=seq.pooling, num_prompt_logprobs=num_prompt_logprobs
        )
        return ScheduledRow(seq, step, seq.num_preemptions)

    # --- update -------------------------------------------------------------------------------------------------------

    def update(self, plan: StepPlan, result: StepResult) -> list[Sequence]:
        """Apply the result of the oldest launched step; returns the sequences that ended with it."""
        step = self.in_flight.popleft()
        assert step.plan is plan, "results must come back in the order of their plans"
        ended: list[Sequence] = []
        running = SequenceStatus.RUNNING  # looked up once: this loop runs for every sequence of every step
        for seq, tokens in zip(step.decodes, result.tokens, strict=False):
            if seq.status is not running:
                continue  # it ended while this token was in flight
            if len(tokens) != 1:
                self._append(seq, tokens, ended)
                continue
            seq.token_ids += tokens
            if len(seq.token_ids) >= seq.check_at or tokens[0] in seq.stop_token_ids:
                self._check(seq, ended)
        if step.rows:
            self._update_rows(step, result, ended)
        if result.logprobs:
            self._keep_logprobs(step, result)
        return ended

    def _update_rows(self, step: ScheduledStep, result: StepResult, ended: list[Sequence]) -> None:
        sampled = iter(result.tokens[len(step.decodes) :])
        for row in step.rows:
            seq = row.seq
            tokens = next(sampled) if row.step.num_sampled else []
            tokens = tokens[: self.num_masks.pop(seq, len(tokens))]
            if seq.status is not SequenceStatus.RUNNING or seq.num_preemptions != row.num_preemptions:
                continue
            seq.prompt_logprobs += result.prompt_logprobs.get(seq.row, ())
            self.block_manager.cache_full_blocks(seq, row.step.num_known)
            if seq.row in result.pooled:
                seq.pooled = result.pooled[seq.row]
                self.finish(seq, "stop")
                ended.append(seq)
            if row.step.num_sampled:
                self._append(seq, tokens, ended)
                self._release_followers(seq)
                if self.config.keeps_row_state and len(tokens) < row.step.num_sampled:
                    seq.redo_from = row.step.start

    def _keep_logprobs(self, step: ScheduledStep, result: StepResult) -> None:
        sampled = _sampled(step.decodes, step.rows)
        for index, logprobs in result.logprobs.items():
            seq = sampled[index]
            seq.logprobs += logprobs[: seq.num_completion_tokens - len(seq.logprobs)]  # the others were dropped above

    def _append(self, seq: Sequence, tokens: list[int], ended: list[Sequence]) -> None:
        """Append a step's tokens up to the one that ends the sequence: a stop token, or the last that has room."""
        kept = tokens[: seq.max_num_tokens - seq.num_tokens]
        for index, token in enumerate(kept):
            if token in seq.stop_token_ids:
                kept = kept[: index + 1]
                break
        seq.token_ids += kept
        self._advance((seq,), len(kept) - 1)  # a step is scheduled as if it gave one token
        self._check(seq, ended)

    def _check(self, seq: Sequence, ended: list[Sequence]) -> None:
        """Register full blocks with the prefix cache and end the sequence if its newest token is its last."""
        self.block_manager.cache_full_blocks(seq, seq.num_tokens - 1)  # the newest token is not computed yet
        self._set_check(seq)
        token = seq.token_ids[-1]
        if token in seq.stop_token_ids:
            self.finish(seq, "stop", token)
        elif seq.num_tokens >= seq.max_num_tokens:
            self.finish(seq, "length")
        if seq.finished:
            ended.append(seq)

    # --- small parts --------------------------------------------------------------------------------------------------

    def drop_guide(self, seq: Sequence) -> None:
        """Let a running sequence continue without its guide."""
        seq.guide = None
        self._num_guided -= 1
        self._steady = None

    def _advance(self, seqs: Iterable[Sequence], num_tokens: int) -> None:
        """Count more positions of these sequences as computed."""
        for seq in seqs:
            seq.num_computed_tokens += num_tokens

    def _set_event(self, seq: Sequence) -> None:
        seq.event_at = seq.max_num_tokens - 1
        if seq.block_tables:  # of a decoding sequence, all of the same length
            seq.event_at = min(seq.event_at, len(seq.block_tables[0].blocks) * self.config.block_size)

    def _set_check(self, seq: Sequence) -> None:
        seq.check_at = seq.max_num_tokens
        if self.config.enable_prefix_caching:
            next_full_block = (seq.num_cached_blocks + 1) * self.config.block_size + 1
            seq.check_at = min(seq.check_at, next_full_block)

    def _leave_running(self, seq: Sequence) -> None:
        (self.decoding if seq in self.decoding else self.prefilling).remove(seq)
        self.block_manager.free(seq)
        self._num_guided -= seq.guide is not None
        self._rows.append(seq.row)
        seq.row = 0
        self._steady = None

    def _release_followers(self, seq: Sequence) -> None:
        for follower in seq.followers:
            if not follower.finished:
                insort(self.waiting, follower, key=lambda seq: seq.order)
        seq.followers = []


def _sampled(decodes: Iterable[Sequence], rows: Iterable[ScheduledRow]) -> list[Sequence]:
    """The sequences that sample, in the order of the result's tokens."""
    return [*decodes, *(row.seq for row in rows if row.step.num_sampled)]
