"""Random operations on the control plane, at depth 0 and 1, with one token per step and with several, compared with the
token oracle after every step.

NANOVLLM_HYPOTHESIS_EXAMPLES=5000 runs that many fresh examples instead of the few fixed ones.
"""

import os
import random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from nanovllm.config import SchedulerConfig
from nanovllm.engine.prefix import Digest, blake2b_256
from nanovllm.state import BlockGroup

from .mutants import operate, random_request
from .oracle import Harness
from .oracle_model import Request, blocks_suffice

EXAMPLES = os.environ.get("NANOVLLM_HYPOTHESIS_EXAMPLES")

settings.register_profile(
    "control-plane",
    max_examples=int(EXAMPLES or 300),
    derandomize=EXAMPLES is None,
    stateful_step_count=40,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def one_byte(content: bytes) -> bytes:
    return blake2b_256(content)[:1]


def nothing(content: bytes) -> bytes:
    """Every block has this digest, so that only the comparison of their content tells them apart."""
    return b""


GROUPS: dict[str, tuple[int | None, ...]] = {
    "full": (None,),
    "windowed": (3,),
    "wide": (9,),
    "mixed": (None, 5),
    "mixed with a narrow window": (None, 1),
    "two windows": (8, 2),
}


class ControlPlane(RuleBasedStateMachine):
    """The operations. The harness checks after each of them."""

    engines: tuple[Harness, ...] = ()

    @initialize(
        block_size=st.sampled_from((1, 2, 4, 16)),
        num_blocks=st.integers(3, 12),
        max_num_seqs=st.integers(1, 6),
        spare_budget=st.sampled_from((0, 1, 4, 64)),
        max_model_len=st.sampled_from((40, 8)),
        enable_prefix_caching=st.sampled_from((True, True, True, False)),
        digest=st.sampled_from((blake2b_256, one_byte, nothing)),
        windows=st.sampled_from(list(GROUPS.values())),
        more_blocks=st.integers(-2, 4),
        lazy=st.booleans(),
        guesses=st.sampled_from((None, 0, 1)),
        pacing=st.sampled_from((None, 0)),
    )
    def open(
        self,
        block_size: int,
        num_blocks: int,
        max_num_seqs: int,
        spare_budget: int,
        max_model_len: int,
        enable_prefix_caching: bool,
        digest: Digest,
        windows: tuple[int | None, ...],
        more_blocks: int,
        lazy: bool,
        guesses: int | None,
        pacing: int | None,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_batched_tokens=max_num_seqs + spare_budget,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            block_size=block_size,
            groups=tuple(BlockGroup(num_blocks + index * more_blocks, window) for index, window in enumerate(windows)),
            enable_prefix_caching=enable_prefix_caching,
        )
        self.num_slots = max(n for n in range(max_model_len + 1) if blocks_suffice(n, self.config))
        self.engines = tuple(
            Harness(
                self.config,
                depth=depth,
                lazy=lazy,
                digest=digest,
                guesses=None if guesses is None else random.Random(guesses),
                pacing=None if pacing is None else random.Random(pacing),
            )
            for depth in (0, 1)
        )

    def add_to_all(self, request: Request) -> None:
        accepted = {engine.add(request) for engine in self.engines}
        assert accepted == {request.fits(self.config)}

    @rule(rng=st.randoms(use_true_random=False), count=st.integers(1, 3))
    def add(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            self.add_to_all(random_request(rng, self.engines[0]))

    @precondition(lambda self: self.num_slots + 2 < self.config.max_model_len)
    @rule(num_missing_blocks=st.integers(0, 1), prompt_share=st.floats(0, 1))
    def add_just_or_not_quite_fitting(self, num_missing_blocks: int, prompt_share: float) -> None:
        num_computed = self.num_slots + num_missing_blocks
        num_prompt_tokens = 1 + int(prompt_share * (num_computed - 1))
        request = Request(prompt=(1,) * num_prompt_tokens, max_tokens=num_computed + 1 - num_prompt_tokens)
        assert request.fits(self.config) == (num_missing_blocks == 0)
        self.add_to_all(request)

    @rule(num_tokens=st.sampled_from((0, 0, 1)))
    def add_what_can_never_run(self, num_tokens: int) -> None:
        self.add_to_all(Request(prompt=(1,) * num_tokens * self.config.max_model_len))

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for engine in self.engines:
            for _ in range(count):
                engine.step()

    @precondition(lambda self: self.engines[0].sequences)
    @rule(data=st.data(), engine=st.integers(0, 1))
    def abort(self, data: st.DataObject, engine: int) -> None:
        number = data.draw(st.sampled_from(self.engines[engine].abort_targets()))
        for each in self.engines:
            each.abort(number)

    @rule(number=st.integers(0, 5), drained=st.booleans())
    def preempt(self, number: int, drained: bool) -> None:
        for engine in self.engines:
            if drained:
                engine.drain()
            engine.preempt(number)

    @rule()
    def reset_prefix_cache(self) -> None:
        for engine in self.engines:
            engine.reset_prefix_cache()

    def teardown(self) -> None:
        for engine in self.engines:
            engine.run_to_end()
        for (seq, _), (late, _) in zip(*(engine.sequences for engine in self.engines), strict=True):
            if "abort" not in (seq.finish_reason, late.finish_reason):
                assert (seq.token_ids, seq.finish_reason) == (late.token_ids, late.finish_reason)
                assert (seq.logprobs, seq.prompt_logprobs) == (late.logprobs, late.prompt_logprobs)


TestControlPlane = ControlPlane.TestCase
TestControlPlane.settings = settings.get_profile("control-plane")


@pytest.mark.parametrize("seed", range(0, 200, 20))
def test_a_window_that_needs_more_blocks_than_there_are(seed: int) -> None:
    """Sequences that rest free blocks of their windows: they must not take them before the step that reports them."""
    for number in range(seed, seed + 20):
        rng = random.Random(number)
        config = SchedulerConfig(
            max_num_batched_tokens=4 + rng.choice((0, 0, 1)),
            max_num_seqs=4,
            max_model_len=40,
            block_size=1,
            groups=(BlockGroup(4, 8), BlockGroup(3, 2)),
            enable_prefix_caching=True,
        )
        harness = Harness(config, depth=rng.randrange(2), lazy=rng.random() < 0.5)
        for _ in range(40):
            operate(rng, harness)
        harness.run_to_end()
