"""Small realistic bugs, patched into the production classes, and the random workload that must find each of them.

A mutant replaces one or two lines of a method's source; the result is compiled and monkeypatched in. If those lines no
longer exist, the mutant fails with an error. The workload depends only on its seed: a tiny random engine and dozens of
random operations on it, checked by the harness of `oracle.py`.
"""

import inspect
import random
import sys
import textwrap
from dataclasses import dataclass

import pytest

from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.block_pool import BlockPool
from nanovllm.engine.proposals import Proposals
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.windows import Windows
from nanovllm.state import BlockGroup

from .oracle import Harness
from .oracle_model import VOCABULARY, Request

# --- the workload -----------------------------------------------------------------------------------------------------


FIRST_WITH_ROWS = 150  # workloads from this seed on also verify proposed tokens and pool


def random_config(rng: random.Random) -> SchedulerConfig:
    max_num_seqs = rng.randint(1, 6)
    num_blocks = rng.randint(3, 12)
    windows = rng.choice(((None,), (None,), (3,), (9,), (None, 4), (7, 2)))
    return SchedulerConfig(
        max_num_batched_tokens=max_num_seqs + rng.choice((0, 1, 3, 8, 64)),
        max_num_seqs=max_num_seqs,
        max_model_len=rng.choice((40, 40, 10)),
        block_size=rng.choice((1, 1, 2, 2, 4, 16)),
        groups=tuple(BlockGroup(num_blocks + 2 * index, window) for index, window in enumerate(windows)),
        enable_prefix_caching=rng.random() < 0.85,
    )


def random_prompt(rng: random.Random, harness: Harness) -> tuple[int, ...]:
    """A prompt that often shares a prefix: an earlier prompt, one with its answer, or new tokens before common ones."""
    kind = rng.choice(("again", "turn", "document", "document")) if harness.sequences else "document"
    seq, expected = rng.choice(harness.sequences[-4:]) if harness.sequences else (None, None)
    if kind == "again":
        return tuple(seq.token_ids[: seq.num_prompt_tokens])
    if kind == "turn":
        text = [*seq.token_ids[: seq.num_prompt_tokens], *expected.token_ids]
    else:
        text = [rng.randrange(2)] * rng.choice((1, 2, 4)) + [1, 0, 1, 1, 0] * 4
    config = harness.config
    room = min(config.groups[0].num_blocks * config.block_size, config.max_model_len)
    text = text[: rng.randint(1, max(1, room * rng.choice((2, 2, 2, 2, 3)) // 3))]
    return (*text, *(rng.randrange(VOCABULARY) for _ in range(rng.choice((0, 0, 1, 2)))))


def random_request(rng: random.Random, harness: Harness) -> Request:
    max_tokens = rng.choice((1, 2, 3, 5, 8, 12, None))
    request = Request(
        prompt=random_prompt(rng, harness),
        max_tokens=max_tokens,
        min_tokens=rng.choice((0, 0, 0, min(2, max_tokens or 2))),
        stop_token_ids=rng.choice(((), (), (rng.randrange(VOCABULARY),), (1, 3))),
        seeds=tuple(rng.randrange(3) for _ in range(rng.choice((1, 1, 1, 2, 3)))),
        priority=rng.choice((0, 0, 0, -1, 1)),
        salt=rng.choice((None, None, None, None, None, "a", "b")),
        logprobs=rng.choice((None, None, 0, 2)),
        prompt_logprobs=rng.choice((None, None, None, None, 0, 2)),
    )
    if harness.pools and len(request.prompt) % 5 == 4:
        pooling = "mean" if len(harness.requests) % 2 else "last"
        request = Request(prompt=request.prompt, pooling=pooling, priority=request.priority, salt=request.salt)
    return request


def operate(rng: random.Random, harness: Harness) -> None:
    weights = {"step": 100, "add": 25, "cancel": 8, "abort": 6, "preempt": 8, "drain": 3, "reset": 1}
    operation = rng.choices([*weights], [*weights.values()])[0]
    if operation in ("add", "cancel"):
        for _ in range(rng.choice((1, 1, 2, 3))):
            harness.add(random_request(rng, harness))
    if operation in ("step", "cancel"):
        harness.step()
    if operation in ("abort", "cancel") and harness.sequences:
        harness.abort(rng.choice(harness.abort_targets()))
    if operation == "preempt":
        harness.preempt(rng.randrange(100))
    if operation == "drain":
        harness.drain()
    if operation == "reset":
        harness.reset_prefix_cache()


def run_workload(seed: int) -> Harness:
    """Run a random workload; raises at the first failed check."""
    rng = random.Random(seed)
    harness = Harness(
        random_config(rng),
        depth=seed % 2,
        lazy=rng.random() < 0.5,
        guesses=random.Random(seed) if seed >= FIRST_WITH_ROWS else None,
        pools=seed >= FIRST_WITH_ROWS,
    )
    for _ in range(60):
        operate(rng, harness)
    harness.run_to_end()
    return harness


# --- the mutants ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    owner: type
    method: str
    old: str
    new: str

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        found = inspect.getattr_static(self.owner, self.method)
        source = textwrap.dedent(inspect.getsource(found.fget if isinstance(found, property) else found))
        name = f"{self.owner.__name__}.{self.method}"
        assert source.count(self.old) == 1, f"{name} has changed: {self.old!r} is not there once; rewrite the mutant"
        code = compile(source.replace(self.old, self.new), f"<mutant of {name}>", "exec")
        namespace: dict[str, object] = {}
        exec(code, vars(sys.modules[self.owner.__module__]), namespace)
        monkeypatch.setattr(self.owner, self.method, namespace[self.method])


MUTANTS: dict[str, tuple[Edit, ...]] = {
    # the prefix cache
    "a hit on the full prompt leaves no token to compute": (
        Edit(BlockManager, "_match", "(seq.num_tokens - 1) // self.block_size", "seq.num_tokens // self.block_size"),
    ),
    "a prefix lacks its parent": (
        Edit(BlockManager, "_match", "find(parent,", "find(self.prefixes.root,"),
        Edit(BlockManager, "cache_full_blocks", "extend(seq.prefix,", "extend(self.prefixes.root,"),
        Edit(BlockManager, "_key", "keys[-1] if keys else", ""),
    ),
    "a prefix lacks the salt": (
        Edit(BlockManager, "_match", "seq.extras)", 'b"")'),
        Edit(BlockManager, "cache_full_blocks", "seq.extras)", 'b"")'),
        Edit(BlockManager, "_key", "seq.extras)", 'b"")'),
    ),
    "a prefix is forgotten while a sequence extends it": (
        Edit(BlockManager, "allocate", "seq.prefix.num_uses += 1", "pass"),
    ),
    "a block that is not full is cached": (
        Edit(BlockManager, "cache_full_blocks", "num_tokens // self.block_size", "self.blocks_for(num_tokens)"),
    ),
    "a generated block is cached before its last token is computed": (
        Edit(
            Scheduler, "_check", "cache_full_blocks(seq, seq.num_tokens - 1)", "cache_full_blocks(seq, seq.num_tokens)"
        ),
    ),
    "a chunk's blocks are cached before they are computed": (
        Edit(
            Scheduler,
            "_chunk",
            "self._advance((seq,), num_new)\n",
            "self._advance((seq,), num_new); self.block_manager.cache_full_blocks(seq, seq.num_computed_tokens)\n",
        ),
    ),
    "prompt scores are wanted, but the cache is read": (
        Edit(BlockManager, "_match", "or seq.needs_all_positions", ""),
    ),
    "a reset leaves blocks with a prefix": (Edit(BlockPool, "forget_prefixes", "self._node_of.clear()", "pass"),),
    # blocks
    "an evicted block can still be found": (Edit(BlockPool, "take", "del self._block_of[node]", "pass"),),
    "a block is given back while another sequence shares it": (
        Edit(BlockPool, "release", "if self._ref_count[block]:", "if self._ref_count[block] < 0:"),
    ),
    "a cached block that is used again can be evicted": (Edit(BlockPool, "acquire", "del self.cached[block]", "pass"),),
    "a prefix hit is counted as available too": (
        Edit(BlockManager, "allocate", "pool.num_available - pool.num_idle(hits[first:])", "pool.num_available"),
    ),
    "a shared block's count does not grow": (
        Edit(BlockPool, "acquire", "self._ref_count[block] += 1", "self._ref_count[block] = 1"),
    ),
    "a request of one block too many is accepted": (
        Edit(Scheduler, "add", "<= group.num_blocks for", "<= group.num_blocks + 1 for"),
    ),
    "a prompt of one block too many is accepted if it asks for no length": (
        Edit(Scheduler, "add", "max(seq.num_tokens, seq.max_num_tokens - 1)", "seq.max_num_tokens - 1"),
    ),
    "a request that just fits is refused": (
        Edit(Scheduler, "add", "max(seq.num_tokens, seq.max_num_tokens - 1)", "seq.max_num_tokens"),
    ),
    # windows
    "a block is freed one token early": (
        Edit(BlockGroup, "first_block", "position - self.window + 1", "position - self.window + 2"),
    ),
    "a block that left the window is kept": (
        Edit(Windows, "slide", "if first > table.first:", "if first > table.first + 1:"),
    ),
    "a freed block is freed again with the sequence": (
        Edit(BlockManager, "free", "reversed(table.held)", "reversed(table.blocks)"),
    ),
    "a block is freed before it can be found": (
        Edit(Windows, "slide", "self._cache_full_blocks(seq, first * self._block_size)", "pass"),
    ),
    "a prefix hit lacks a block of the window": (Edit(Windows, "_limit", "first - 1, -1)", "first, -1)"),),
    "a prefix hit looks at one group alone": (
        Edit(BlockManager, "_match", "nodes[: self._windows.num_served(nodes)]", "nodes"),
    ),
    "a request that fills its window is accepted without a block for its next token": (
        Edit(BlockGroup, "most_blocks", "// block_size) + 1", "// block_size)"),
    ),
    "a chunk gets more tokens than blocks": (
        Edit(
            BlockManager,
            "extend",
            "self.blocks_for(end)",
            "(end - 1) // self.block_size",
        ),
    ),
    "the device is not told of a chunk's blocks": (Edit(Scheduler, "_chunk", "new_blocks += blocks", "pass"),),
    "a sequence without a block for its next chunk runs": (
        Edit(Scheduler, "schedule", "if not self.block_manager.is_covered(seq)", "if False"),
    ),
    "a sequence that has just been prefilled keeps its chunk's blocks": (
        Edit(Scheduler, "_chunk", "seq.event_at = seq.num_computed_tokens", "pass"),
    ),
    # preemption
    "a preempted sequence keeps its count of computed tokens": (
        Edit(BlockManager, "free", "seq.num_computed_tokens = 0", "pass"),
        Edit(
            BlockManager,
            "allocate",
            "seq.num_computed_tokens = len(hits) * self.block_size",
            "seq.num_computed_tokens = max(seq.num_computed_tokens, len(hits) * self.block_size)",
        ),
    ),
    "a sequence is preempted with a token in flight": (
        Edit(Scheduler, "_grow", "if victim.has_token_in_flight:", "if False:"),
        Edit(Scheduler, "preempt", "assert not seq.has_token_in_flight", "pass"),
    ),
    "the oldest sequence is preempted instead of the newest": (
        Edit(Scheduler, "_grow", "max(self.running", "min(self.running"),
    ),
    "prompt scores of an earlier life are kept": (Edit(Scheduler, "preempt", "seq.prompt_logprobs = []", "pass"),),
    "a chunk of an earlier life counts": (
        Edit(Scheduler, "_update_rows", "or seq.num_preemptions != row.num_preemptions", ""),
    ),
    # overlapped steps
    "the token of an ended sequence is kept": (
        Edit(Scheduler, "update", "if seq.status is not running:", "if False:"),
    ),
    "the token of an ended sequence goes to the next one": (
        Edit(
            Scheduler,
            "_update_rows",
            "next(sampled) if row.step.num_sampled",
            "next(sampled) if row.step.num_sampled and not seq.finished",
        ),
    ),
    "logprobs of a dropped token are kept": (
        Edit(Scheduler, "_keep_logprobs", "[: seq.num_completion_tokens - len(seq.logprobs)]", ""),
    ),
    "a resting sequence runs all the same": (Edit(Scheduler, "schedule", "if seq not in resting", "if True"),),
    "the steady plan outlives a sequence": (Edit(Scheduler, "_leave_running", "self._steady = None", "pass"),),
    "new blocks are told again with every steady step": (
        Edit(Scheduler, "schedule", "if repeated == step.plan", "if True"),
    ),
    # several tokens
    "a stop token in the middle is missed": (Edit(Scheduler, "_append", "kept = kept[: index + 1]", "pass"),),
    "a sequence grows beyond its limit": (
        Edit(Scheduler, "_append", "tokens[: seq.max_num_tokens - seq.num_tokens]", "tokens"),
        Edit(Proposals, "choose", "seq.max_num_tokens - seq.num_tokens - 1)", "seq.max_num_tokens)"),
    ),
    "several tokens count as one computed": (
        Edit(Scheduler, "_append", "self._advance((seq,), len(kept) - 1)", "pass"),
    ),
    "rejected tokens are in the prefix cache": (
        Edit(Scheduler, "_update_rows", "row.step.num_known)", "row.step.start + row.step.num_new)"),
    ),
    "proposed tokens have no block": (Edit(Proposals, "choose", "proposed[: end - seq.num_tokens]", "proposed"),),
    "a row is verified twice at once": (Edit(Scheduler, "_handle_events", "if seq.has_token_in_flight]", "if False]"),),
    "a verified row decodes from a length that is not known": (
        Edit(Proposals, "choose", "if proposed or seq.was_verified:", "if proposed:"),
    ),
    "proposed tokens are not charged to the budget": (Edit(Proposals, "choose", "budget -= len(proposed)", "pass"),),
    # pooling
    "the mean of a prompt is read from the cache": (
        Edit(Sequence, "needs_all_positions", 'self.pooling == "mean" or ', ""),
    ),
    "a pooled row never ends": (Edit(Scheduler, "_update_rows", 'self.finish(seq, "stop")', "pass"),),
    "a pooled row decodes": (
        Edit(Scheduler, "_handle_events", "if seq.num_computed_tokens >= seq.max_num_tokens - 1 and", "if False and"),
    ),
    # lengths, budget, rows
    "a new block comes one token late": (
        Edit(Scheduler, "_set_event", "* self.config.block_size)", "* self.config.block_size + 1)"),
    ),
    "the device is not told of a new block": (Edit(Scheduler, "schedule", "new_blocks=tuple(new_blocks),", ""),),
    "the length is noticed one token late": (
        Edit(Scheduler, "_set_check", "= seq.max_num_tokens", "= seq.max_num_tokens + 1"),
    ),
    "a chunk ignores the budget": (
        Edit(Scheduler, "_chunk", "min(seq.num_tokens - start, budget)", "seq.num_tokens - start"),
    ),
    "decodes are not charged to the budget": (Edit(Scheduler, "schedule", "budget -= len(decodes)", "pass"),),
    "a row is not given back": (Edit(Scheduler, "_leave_running", "self._rows.append(seq.row)", "pass"),),
    # followers
    "followers are lost": (Edit(Scheduler, "_release_followers", "if not follower.finished:", "if False:"),),
    "followers are lost when their leader is aborted": (
        Edit(Scheduler, "finish", "self._release_followers(seq)", "pass"),
    ),
    "an aborted follower runs all the same": (
        Edit(Scheduler, "_release_followers", "if not follower.finished:", "if True:"),
    ),
}
