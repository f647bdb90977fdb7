"""A small scheduler, sequences for it, and its steps driven by hand."""

from dataclasses import replace

from nanovllm.config import SchedulerConfig
from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import StepPlan, StepResult, TokenLogprobs
from nanovllm.sampling_params import SamplingParams
from nanovllm.state import BlockGroup

CONFIG = SchedulerConfig(
    max_num_batched_tokens=64,
    max_num_seqs=4,
    max_model_len=64,
    block_size=4,
    groups=(BlockGroup(16),),
    enable_prefix_caching=True,
)
TOKEN, STOP = 90, 99
SCORE = TokenLogprobs((1,), (-1.0,), 1)


def make_scheduler(**changes: object) -> Scheduler:
    return Scheduler(replace(CONFIG, **changes))


def make_seq(
    prompt: range | list[int], *, arrival: int = 0, max_tokens: int = 8, priority: int = 0, **params: object
) -> Sequence:
    return Sequence(
        f"request-{arrival}",
        list(prompt),
        SamplingParams(max_tokens=max_tokens or None, **params),
        max_num_tokens=len(prompt) + max_tokens,
        stop_token_ids=frozenset({STOP}),
        priority=priority,
        arrival=arrival,
    )


def add(scheduler: Scheduler, *seqs: Sequence) -> None:
    for seq in seqs:
        scheduler.add(seq)


def schedule(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    check_scheduler(scheduler)
    return plan


def num_sampled_rows(plan: StepPlan) -> int:
    return len(plan.decode_rows) + sum(step.num_sampled > 0 for step in plan.row_steps)


def update(scheduler: Scheduler, plan: StepPlan, token: int = TOKEN) -> list[Sequence]:
    """A result in which every sampled row gets the same token and every scored position the same score."""
    scored = {
        chunk.row: [SCORE] * (min(chunk.start + chunk.num_new, prompt_len(scheduler, chunk.row) - 1) - chunk.start)
        for chunk in plan.row_steps
        if chunk.num_prompt_logprobs is not None
    }
    tokens = [[token] for _ in range(num_sampled_rows(plan))]
    ended = scheduler.update(plan, StepResult(tokens=tokens, prompt_logprobs=scored))
    check_scheduler(scheduler)
    return ended


def prompt_len(scheduler: Scheduler, row: int) -> int:
    return next((seq.num_prompt_tokens for seq in scheduler.running if seq.row == row), 0)


def step(scheduler: Scheduler, token: int = TOKEN) -> StepPlan:
    plan = schedule(scheduler)
    update(scheduler, plan, token)
    return plan
