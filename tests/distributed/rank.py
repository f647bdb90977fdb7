"""One rank of the tests: runs every case it takes part in and prints the results.

Each rank runs its own scheduler, so that all have the same plans in the same order without exchanging them.
"""

import json
import sys
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from nanovllm.attention.backend import LayerCache
from nanovllm.config import Config
from nanovllm.distributed.collectives import join, sampling_rank
from nanovllm.distributed.group import Parallel, Rank
from nanovllm.engine.core import EngineCore
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.models.registry import describe
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.sampling_params import SamplingParams
from nanovllm.weights.dense import DenseWeight

TIMEOUT = 120.0


@dataclass
class OnlyThese:
    """A guide that allows the same few tokens at every position."""

    token_ids: list[int]
    vocab_size: int
    num_tokens: int = 0
    is_over: bool = False

    def mask_after(self, new_tokens: list[int]) -> bytes:
        self.num_tokens += len(new_tokens)
        bits = sum(1 << token for token in self.token_ids)
        return bits.to_bytes((self.vocab_size + 7) // 8, "little")

    def masks_after_proposed(self, proposed: Seq[int]) -> list[bytes]:
        return [self.mask_after([])] * len(list(takewhile(self.token_ids.__contains__, proposed)))


@dataclass
class Answers:
    """A proposer of two tokens that knows how each text continues; every other time its second token is wrong."""

    texts: list[list[int]]

    def propose(self, token_ids: Seq[int], max_tokens: int) -> list[int]:
        count = len(token_ids)
        text = next(text for text in self.texts if text[:count] == token_ids)
        first, *second = text[count : count + 2]
        return [first, *(token + count % 2 for token in second)][:max_tokens]


@dataclass
class Seen:
    """The results of one rank for one case."""

    token_ids: list[list[int]] = field(default_factory=list)  # one list per request
    logprobs: list[list[list[Any]]] = field(default_factory=list)
    prompt_logprobs: list[list[list[Any]]] = field(default_factory=list)
    embeddings: list[list[float]] = field(default_factory=list)
    num_preemptions: int = 0
    num_steps: int = 0
    num_blocks: int = 0
    num_weights: int = 0  # elements that this rank's checkpoint slots hold
    cache_elements: int = 0
    returns_result: bool = True


def run_case(case: dict[str, Any], parallel: Parallel) -> Seen:
    path = Path(case["model"])
    config = Config(
        **{
            "device": "cpu",
            "dtype": "float32",
            "max_num_seqs": 8,
            "max_num_batched_tokens": 4096,
            "kv_cache_block_size": 16,
            "num_kv_cache_blocks": 64,
        }
        | case.get("options", {})
    )
    model = describe(path).config
    runner = ModelRunner(config, model, path, device=torch.device("cpu"), max_model_len=256, parallel=parallel)
    sizes = config.scheduler_config(max_model_len=256, groups=runner.cache_size.groups)
    proposer = Answers(case["answers"]) if "answers" in case else None
    core = EngineCore(Scheduler(sizes, proposer=proposer), runner, depth=case.get("depth", 0))
    seqs = [_sequence(index, asked, model.vocab_size) for index, asked in enumerate(case["requests"])]
    pooling = [_pooling_sequence(text, pooling) for text in case.get("embed", ()) for pooling in ("last", "mean")]
    for seq in seqs + pooling:
        core.scheduler.add(seq)
    this = parallel.rank
    seen = Seen(num_blocks=runner.cache_size.num_blocks, returns_result=this.index == sampling_rank(this))
    dense = [slot for slot in runner.model.slots().values() if isinstance(slot.target, DenseWeight)]
    seen.num_weights = sum(slot.target.tensor[index].numel() for slot in dense for index, _ in slot.places)
    caches = {id(state): state for state in runner.states if isinstance(state, LayerCache)}  # some layers share one
    seen.cache_elements = sum(cache.kv.numel() for cache in caches.values())
    while core.has_work:
        core.step()
        seen.num_steps += 1
    for seq in seqs:
        seen.token_ids.append(seq.completion_token_ids)
        for found, scores in ((seen.logprobs, seq.logprobs), (seen.prompt_logprobs, seq.prompt_logprobs)):
            found.append([[list(one.token_ids), list(one.logprobs), one.rank] for one in scores])
        seen.num_preemptions += seq.num_preemptions
    seen.embeddings = [seq.pooled for seq in pooling]
    runner.close()
    return seen


def _sequence(index: int, asked: dict[str, Any], vocab_size: int) -> Sequence:
    params = SamplingParams(**({"ignore_eos": True} | asked["params"]))
    allowed = asked.get("allowed")
    return Sequence(
        str(index),
        asked["prompt"],
        params,
        max_num_tokens=len(asked["prompt"]) + params.max_tokens,
        seed=index,
        arrival=index,
        guide=None if allowed is None else OnlyThese(allowed, vocab_size),
    )


def _pooling_sequence(text: list[int], pooling: str) -> Sequence:
    return Sequence("embedding", text, SamplingParams(), max_num_tokens=len(text), pooling=pooling)


def exchange(parallel: Parallel) -> dict[str, Any]:
    """Results of the group operations, with tensors that identify their rank: rank 2's is 2.0 everywhere."""
    world, pipeline, rank = parallel.world, parallel.pipeline, float(parallel.rank.index)
    x = torch.full((2, 1), rank)
    gathered = world.gather(x, to=1)
    seen = {
        "sum": world.all_reduce(x.clone()).tolist(),
        "ordered sum": world.in_order().all_reduce(torch.tensor([1e8, -1e8, 1.0, 3.0])[int(rank)].reshape(1)).tolist(),
        "half sum": world.all_reduce(x.to(torch.bfloat16)).tolist(),
        "tensor": parallel.tensor.all_gather(x, dim=0).tolist(),
        "pipeline": pipeline.all_gather(x).tolist(),
        "gathered": None if gathered is None else gathered.tolist(),
        "from 3": world.broadcast(x.clone(), 3).tolist(),
    }
    if pipeline.rank > 0:
        seen["received"] = pipeline.receive(torch.empty(2, 1), pipeline.rank - 1).tolist()
    if pipeline.rank < pipeline.size - 1:
        pipeline.send(x, pipeline.rank + 1)
    return seen


def main(rank: int, cases: Path) -> None:
    torch.set_num_threads(1)
    for case in json.loads(cases.read_text()):
        this = Rank(rank, case["tensor"], case["pipeline"], 0)
        if rank < this.world_size:
            parallel = join(this, torch.device("cpu"), host="127.0.0.1", port=case["port"], timeout_seconds=TIMEOUT)
            seen = run_case(case, parallel).__dict__ if "model" in case else exchange(parallel)
            print(json.dumps([case["name"], seen]), flush=True)
            parallel.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
