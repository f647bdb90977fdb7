"""The prefix cache of models with a state per row: exact in random workloads, on a device that checks what it reads.

A row's state is a number that depends on every token so far, and so does each sampled token. The device here keeps it
with the runner's `RowStates`, fills rows with rubbish before they are given to a sequence, and asserts before each step
that state and blocks are those of exactly the tokens before it.
"""

from collections import deque
from collections.abc import Sequence as Seq
from random import Random
from typing import Any

import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.config import Config
from nanovllm.engine.checkpoints import CheckpointedBlocks
from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.errors import ConfigError
from nanovllm.plan import StepPlan, StepResult
from nanovllm.row_state import RowState
from nanovllm.runner.row_states import RowStates, check_room
from nanovllm.state import BlockGroup
from tests.test_proposer import TwoTokens

SIZE, VOCAB, RUBBISH = 16, 50, 1e9


def state_after(tokens: Seq[int], state: int = 0) -> int:
    for token in tokens:
        state = (state * 31 + token + 7) % 16_777_213  # below 2 ** 24: float32 has it exactly
    return state


def next_token(state: int) -> int:
    return state // 7 % VOCAB


def completion_of(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(state_after(tokens)))
    return tokens[len(prompt) :]


class Device:
    """Runs plans."""

    def __init__(self, config: Config) -> None:
        self._states = RowStates([RowState((1,))], config, device=torch.device("cpu"))
        (self._state,) = self._states.layers
        self._tokens: dict[int, list[int]] = {}
        self._tables: dict[int, list[int]] = {}
        self._blocks: dict[tuple[int, int], int] = {}  # (block, offset) -> the state after this token

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.new_rows:
            self._state[new.row] = RUBBISH
            self._tokens[new.row] = list(new.token_ids)
            self._tables[new.row] = [block for table in new.block_tables[:1] for block in table]
        for blocks in plan.new_blocks:
            table = self._tables[blocks.row]
            table[blocks.index :] = blocks.blocks
        self._states.apply(plan)
        results = []
        for row in plan.decode_rows:
            results.append(self._compute(row, len(self._tokens[row]) - 1, 1, 1))
            self._tokens[row] += results[-1]
        for step in plan.row_steps:
            if step.num_sampled:
                self._tokens[step.row] = [*self._tokens[step.row][: step.num_known], *step.proposed]
            sampled = self._compute(step.row, step.start, step.num_new, step.num_sampled)
            guesses = step.proposed
            agreed = next((i for i, guess in enumerate(guesses) if sampled[i] != guess), len(guesses))
            if step.num_sampled:
                results.append(sampled[: agreed + 1])
                self._tokens[step.row] = [*self._tokens[step.row][: step.num_known], *results[-1]]
        return StepResult(tokens=results)

    def _compute(self, row: int, start: int, num_new: int, num_sampled: int) -> list[int]:
        tokens, table, states = self._tokens[row], self._tables[row], []
        before = [state_after(tokens[: at + 1]) for at in range(start)]
        if table:
            assert [self._blocks[table[at // SIZE], at % SIZE] for at in range(start)] == before, "wrong blocks"
        state = int(self._state[row].item()) if start else 0
        assert state == state_after(tokens[:start]), "a wrong state"
        for at in range(start, start + num_new):
            state = state_after(tokens[at : at + 1], state)
            states.append(state)
            if table:
                self._blocks[table[at // SIZE], at % SIZE] = state
        self._state[row] = state
        return [next_token(state) for state in states[num_new - num_sampled :]]


class Engine:
    def __init__(self, *, proposer: Any = None, depth: int = 0, num_blocks: int = 40, **options: Any) -> None:
        options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
        config = Config(model="", kv_cache_block_size=SIZE, **options)
        groups = (BlockGroup(num_blocks),) if num_blocks else ()
        sizes = config.scheduler_config(max_model_len=400, groups=groups, keeps_row_state=True)
        self.scheduler, self.device = Scheduler(sizes, proposer=proposer), Device(config)
        self._depth, self._num_added = depth, 0
        self._pending: deque[tuple[StepPlan, StepResult]] = deque()

    def add(self, prompt: list[int], max_tokens: int) -> Sequence:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self._num_added += 1
        name = str(self._num_added)
        limit = len(prompt) + max_tokens
        seq = Sequence(name, prompt, params, max_num_tokens=limit, arrival=self._num_added)
        self.scheduler.add(seq)
        return seq

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            self._pending.append((plan, self.device.run(plan)))
        if self._pending and (plan is None or len(self._pending) > self._depth):
            self.scheduler.update(*self._pending.popleft())
        check_scheduler(self.scheduler)

    def finish(self) -> None:
        while self.scheduler.num_unfinished or self._pending:
            self.step()

    def answer(self, prompt: list[int], max_tokens: int) -> Sequence:
        """Of a request alone."""
        seq = self.add(prompt, max_tokens)
        self.finish()
        assert seq.completion_token_ids == completion_of(prompt, max_tokens)
        return seq


def tokens_of(random: Random, count: int) -> list[int]:
    return [random.randrange(VOCAB) for _ in range(count)]


@pytest.mark.parametrize("seed", range(12))
def test_random_workloads(seed: int) -> None:
    random = Random(seed)
    bases = [tokens_of(random, random.randrange(10, 90)) for _ in range(3)]
    asked = []
    for _ in range(25):
        base = random.choice([*bases, *(prompt + completion_of(prompt, count) for prompt, count in asked[-3:])])
        prompt = base[: random.randrange(1, len(base) + 1)] + tokens_of(random, random.randrange(1, 40))
        asked.append((prompt[:150], random.randrange(1, 40)))
    texts = [prompt + completion_of(prompt, count) for prompt, count in asked]
    engine = Engine(
        proposer=TwoTokens(texts) if seed % 3 == 0 else None,
        depth=seed % 2,
        num_blocks=0 if seed == 7 else random.choice([14, 20, 60]),
        max_num_batched_tokens=random.choice([4, 7, 33, 200]),
    )
    seqs = []
    for prompt, count in asked:
        seqs.append(engine.add(prompt, count))
        for _ in range(random.randrange(20)):
            engine.step()
        if random.random() < 0.1:
            engine.scheduler.abort(random.choice(seqs))
        if random.random() < 0.05:
            engine.scheduler.block_manager.reset_prefix_cache()
    engine.finish()
    for seq, (prompt, count) in zip(seqs, asked, strict=True):
        expected = completion_of(prompt, count)
        assert (
            seq.completion_token_ids == expected[: None if seq.finish_reason == "length" else seq.num_completion_tokens]
        )
    assert engine.scheduler.block_manager.num_hit_tokens > 0


def test_a_repeated_prompt_continues_before_its_last_block() -> None:
    engine, prompt = Engine(), tokens_of(Random(1), 100)
    assert [engine.answer(prompt, 3).num_cached_tokens for _ in range(2)] == [0, 96]
    assert engine.answer(prompt[:96], 3).num_cached_tokens == 0, "no checkpoint before the 96th token"


def test_a_shared_beginning_is_found_by_the_third_request() -> None:
    engine, random = Engine(), Random(2)
    shared = tokens_of(random, 70)
    cached = [engine.answer(shared + tokens_of(random, 50), 3).num_cached_tokens for _ in range(4)]
    assert cached == [0, 0, 64, 64]


def test_a_conversation_continues_after_the_last_answer() -> None:
    engine, text = Engine(), tokens_of(Random(3), 20)
    for turn in range(4):
        seq = engine.answer(text, 30)
        assert seq.num_cached_tokens == (turn and (len(text) - 11) // SIZE * SIZE)
        text = [*seq.token_ids, *tokens_of(Random(turn), 10)]


def test_a_preempted_sequence_goes_on_from_its_newest_block() -> None:
    engine, prompt = Engine(), tokens_of(Random(4), 20)
    seq = engine.add(prompt, 70)
    while seq.num_tokens < 75:
        engine.step()
    engine.scheduler.preempt(seq)
    engine.finish()
    assert seq.completion_token_ids == completion_of(prompt, 70)
    assert engine.scheduler.block_manager.num_hit_tokens == 64


def test_the_least_recently_used_checkpoint_is_replaced() -> None:
    engine = Engine(max_num_seqs=1, num_blocks=400)  # two checkpoints
    prompts = [tokens_of(Random(seed), 40) for seed in range(3)]
    for index, cached in ((0, 0), (1, 0), (0, 32), (2, 0), (0, 32), (1, 0)):
        assert engine.answer(prompts[index], 1).num_cached_tokens == cached


def test_states_that_do_not_fit_are_refused_with_the_number_that_does() -> None:
    config = Config(model="", max_num_seqs=100, max_num_batched_tokens=100)
    check_room(2**20, config, num_bytes=301 * 2**20)
    with pytest.raises(ConfigError, match="max_num_seqs=100 .* 1.00 MiB, and with 200 checkpoints .* to at most 49"):
        check_room(2**20, config, num_bytes=150 * 2**20)


def test_without_the_prefix_cache_there_are_no_checkpoints() -> None:
    engine, prompt = Engine(enable_prefix_caching=False), tokens_of(Random(1), 100)
    assert [engine.answer(prompt, 3).num_cached_tokens for _ in range(2)] == [0, 0]
    assert not isinstance(engine.scheduler.block_manager, CheckpointedBlocks)
