"""Several ranks (processes over gloo) give the tokens of one: every family, with TP, with PP and with both."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nanovllm.distributed.collectives import open_store
from nanovllm.distributed.group import Parallel, Rank
from nanovllm.layers.spec import AttentionSpec
from nanovllm.models.parameters import num_bytes, num_parameters
from nanovllm.models.registry import describe
from nanovllm.models.shard import shard_of
from tests.checkpoint.gguf_files import write_model
from tests.distributed.rank import TIMEOUT, Seen, run_case
from tests.helpers import assert_greedy, generate_by_reference, model_dir, prompt_of
from tests.weights import test_fp4, test_gguf_groups, test_groups
from tests.weights.packed_files import write_packed
from tests.weights.test_fp8 import WEIGHT_ONLY, WEIGHT_ONLY_BLOCKS, pack_blocks, pack_rows

SPLITS = {"one": (1, 1), "tensor": (2, 1), "pipeline": (1, 2), "both": (2, 2)}
LENGTHS = (1, 16, 37, 70)
FAMILIES = (
    *(
        "deepseek-v2",
        "deepseek-v3",
        "gemma3-even",
        "gemma4-even",
        "gemma4-e-even",
        "gemma4-moe-even",
        "glm4",
        "gpt-oss-even",
        "granite-even",
        "granite4",
        "lfm2-attention-last",
        "lfm2-moe-even",
        "llama",
        "llama-old-rope3",
        "ministral3-even",
        "mistral-even",
        "olmo3-even",
        "phi4-mini",
        "qwen2-even",
        "qwen2-upper-layers-slide",
    ),
    *("qwen3", "qwen3-next", "qwen3.5-moe", "qwen3-sharded", "qwen3-moe", "qwen3-moe-stacked-even", "llama-bias-even"),
)
BOTH = ("qwen3-moe", "qwen2-even")  # also run with four ranks


def greedy(lengths: tuple[int, ...] = LENGTHS, max_tokens: int = 8, **settings: Any) -> list[dict[str, Any]]:
    params = {"temperature": 0.0, "max_tokens": max_tokens, **settings}
    return [{"prompt": prompt_of(length), "params": params} for length in lengths]


def sampled() -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.8}, {"top_k": 20}]
    asked += [{"presence_penalty": 1.0, "logprobs": 3}, {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 1}]
    return [{"prompt": prompt_of(30, seed=i), "params": {"max_tokens": 10} | one} for i, one in enumerate(asked)]


def ways(folder: Path) -> dict[str, dict[str, Any]]:
    """The cases besides the families, by name; `splits` if a case does not run with all of them."""
    guided = greedy((20, 21), max_tokens=6)
    guided[0]["allowed"] = [5, 7, 11]
    tight = {"num_kv_cache_blocks": 10, "max_num_seqs": 8}
    small = {"max_num_batched_tokens": 8, "max_num_seqs": 8}
    gguf = folder / "tiny.gguf"
    write_model(gguf, "llama")
    moe = folder / "moe.gguf"
    write_model(moe, "qwen3moe")
    packed_gguf = folder / "packed.gguf"
    test_gguf_groups.write(packed_gguf, "qwen3moe", test_gguf_groups.MOE)
    dummy = {"load_format": "dummy", "seed": 3}
    int4 = {"quantization": "int4"}
    odd = folder / "odd"
    odd.mkdir()
    config = json.loads((model_dir("llama-old-rope3") / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(config | {"vocab_size": 161}))
    packed: dict[str, Any] = {"fp8 blocks": (pack_blocks, WEIGHT_ONLY_BLOCKS), "fp8 rows": (pack_rows, WEIGHT_ONLY)}
    files = {name: write_packed("qwen3-moe", folder / name, *how) for name, how in packed.items()}
    # words of AWQ hold eight rows, which the experts' rows of two ranks do not fill
    groups = {"awq": "qwen3", "gptq ordered": "qwen3-moe", "packed asymmetric": "qwen3-moe"}
    files |= {"mxfp4": test_fp4.write_stacked(folder / "mxfp4")}
    files |= {case: test_groups.write(case, folder / case, name) for case, name in groups.items()}
    quantized = {name: {"model": one.packed, "requests": greedy()} for name, one in files.items()}
    return quantized | {
        "chunked": {"model": model_dir("llama"), "options": small, "requests": greedy()},
        "preempted": {"model": model_dir("llama"), "options": tight, "requests": greedy((30, 40, 41, 42), 20)},
        "overlapped": {"model": model_dir("qwen3"), "depth": 1, "options": tight, "requests": greedy((30, 40, 41), 20)},
        "sampled": {"model": model_dir("llama"), "requests": sampled(), "splits": tuple(SPLITS)},
        "guided": {"model": model_dir("llama"), "requests": guided, "depth": 1},
        "verified": {
            "model": model_dir("llama"),
            "requests": greedy(),
            "answers": [prompt_of(n) + generate_by_reference("llama", prompt_of(n), 8) for n in LENGTHS],
            "depth": 1,
        },
        "embedded": {
            "model": model_dir("qwen3"),
            "options": small,
            "requests": [],
            "embed": [prompt_of(20), prompt_of(3)],
        },
        "gguf": {"model": gguf, "requests": few_tokens()},
        "packed gguf": {"model": packed_gguf, "options": {"quantization": "gguf"}, "requests": few_tokens()},
        "gguf of experts": {"model": moe, "requests": few_tokens()},
        "dummy": {"model": model_dir("qwen3-moe"), "options": dummy, "requests": greedy(max_tokens=8)},
        "int4": {"model": model_dir("qwen3-moe"), "options": int4, "requests": greedy(max_tokens=8)},
        "int4 dummy": {"model": model_dir("qwen3-moe"), "options": int4 | dummy, "requests": greedy(max_tokens=8)},
        "odd vocabulary": {"model": odd, "options": dummy, "requests": greedy(max_tokens=8)},
    }


def few_tokens() -> list[dict[str, Any]]:
    return [{"prompt": [1, 5, 3, 2, 7, 4, 6], "params": {"temperature": 0.0, "max_tokens": 8}}]


Results = dict[tuple[str, str], list[Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By case and split: the results of each rank. The same processes run all cases, one after the other."""
    folder = tmp_path_factory.mktemp("ranks")
    plain: dict[str, dict[str, Any]] = {name: {"model": model_dir(name), "requests": greedy()} for name in FAMILIES}
    plain = {name: case | {"splits": tuple(SPLITS)} if name in BOTH else case for name, case in plain.items()}
    everything = plain | ways(folder) | {"exchange": {"splits": ("both",)}}
    cases, stores = [], []
    found: Results = {}
    for name, case in everything.items():
        for split in case.pop("splits", ("one", "tensor", "pipeline")):
            tensor, pipeline = SPLITS[split]
            if split == "one":
                found[name, split] = [run_case(case, Parallel())]
                continue
            stores.append(open_store("127.0.0.1"))
            place = {"name": [name, split], "tensor": tensor, "pipeline": pipeline, "port": stores[-1].port}
            cases.append(case | place)
    file = folder / "cases.json"
    file.write_text(json.dumps(cases, default=str))
    for line in _run_ranks(file):
        (name, split), seen = json.loads(line)
        found.setdefault((name, split), []).append(seen if name == "exchange" else Seen(**seen))
    return found


def _run_ranks(cases: Path) -> Iterator[str]:
    """The output of ranks 0 to 3, in order."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.distributed.rank", str(rank), str(cases)],
            cwd=Path(__file__).parents[2],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(4)
    ]
    try:
        for rank in ranks:
            out, err = rank.communicate(timeout=2 * TIMEOUT)
            assert rank.returncode == 0, err
            yield from out.splitlines()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def check_equal(results: Results, name: str) -> Seen:
    """Assert that all ranks of all splits have the tokens of a single rank; returns that rank's results."""
    (alone,) = results[name, "one"]
    for split in ("tensor", "pipeline", "both"):
        for rank, seen in enumerate(results.get((name, split), [])):
            assert seen.token_ids == alone.token_ids, f"{name}, {split}, rank {rank}"
    assert len(results[name, "tensor"]) == len(results[name, "pipeline"]) == 2
    return alone


@pytest.mark.parametrize("name", FAMILIES)
def test_families(results: Results, name: str) -> None:
    alone = check_equal(results, name)
    for length, token_ids in zip(LENGTHS, alone.token_ids, strict=True):
        assert_greedy(name, prompt_of(length), token_ids)
    assert len(results.get((name, "both"), [])) == (4 if name in BOTH else 0)


@pytest.mark.parametrize(
    "name",
    [
        *("chunked", "gguf", "gguf of experts", "dummy", "odd vocabulary", "guided", "verified"),
        *("fp8 blocks", "fp8 rows", "awq", "gptq ordered", "packed asymmetric", "packed gguf"),
        *("mxfp4", "int4", "int4 dummy"),
    ],
)
def test_ways(results: Results, name: str) -> None:
    alone = check_equal(results, name)
    assert all(alone.token_ids)
    if name == "guided":
        assert set(alone.token_ids[0]) <= {5, 7, 11} and not set(alone.token_ids[1]) <= {5, 7, 11}


@pytest.mark.parametrize("name", ["preempted", "overlapped"])
def test_preemption(results: Results, name: str) -> None:
    assert check_equal(results, name).num_preemptions > 0
    assert all(seen.num_preemptions > 0 for seen in results[name, "pipeline"])


def test_sampling_and_logprobs(results: Results) -> None:
    alone = check_equal(results, "sampled")
    for split in ("tensor", "pipeline", "both"):
        ranks = results["sampled", split]
        assert [seen.returns_result for seen in ranks].count(True) == 1
        (carrier,) = [seen for seen in ranks if seen.returns_result]
        for ours, theirs in (
            (carrier.logprobs, alone.logprobs),
            (carrier.prompt_logprobs, alone.prompt_logprobs),
        ):
            assert [len(scores) for scores in ours] == [len(scores) for scores in theirs]
            for (ids, values, rank), (other_ids, other_values, other_rank) in zip(
                sum(ours, []), sum(theirs, []), strict=True
            ):
                assert (ids, rank) == (other_ids, other_rank)
                assert values == pytest.approx(other_values, abs=1e-4)
    assert alone.logprobs[3] and alone.prompt_logprobs[4]


def test_embeddings_are_on_every_rank(results: Results) -> None:
    (alone,) = results["embedded", "one"]
    assert len(alone.embeddings) == 4
    for split in ("tensor", "pipeline"):
        for seen in results["embedded", split]:
            torch.testing.assert_close(torch.tensor(seen.embeddings), torch.tensor(alone.embeddings))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_holds_its_share_alone(results: Results, name: str) -> None:
    config = describe(model_dir(name)).config
    (alone,) = results[name, "one"]
    for split in ("tensor", "pipeline"):
        for rank, seen in enumerate(results[name, split]):
            shard = shard_of(config, Rank(rank, *SPLITS[split]))
            assert seen.num_weights == num_bytes(shard, lambda prefix, weight, shape: math.prod(shape))
            assert seen.num_blocks == alone.num_blocks
        if split == "tensor":
            assert seen.num_weights < 0.6 * alone.num_weights
    assert alone.num_weights == num_parameters(config)
    assert sum(seen.cache_elements for seen in results[name, "pipeline"]) == alone.cache_elements
    mixers = [layer.mixer for layer in config.layers]
    copies = 2 if any(isinstance(mixer, AttentionSpec) and mixer.num_kv_heads == 1 for mixer in mixers) else 1
    assert sum(seen.cache_elements for seen in results[name, "tensor"]) == copies * alone.cache_elements


def test_what_groups_exchange(results: Results) -> None:
    """Ranks 0 and 1 are one stage, 2 and 3 the next."""
    ranks = results["exchange", "both"]
    assert all(seen["sum"] == seen["half sum"] == [[6.0], [6.0]] for seen in ranks)
    assert all(seen["ordered sum"] == [4.0] for seen in ranks)  # the large numbers first
    assert all(seen["from 3"] == [[3.0], [3.0]] for seen in ranks)
    first, second = [[0.0], [0.0], [1.0], [1.0]], [[2.0], [2.0], [3.0], [3.0]]
    assert [seen["tensor"] for seen in ranks] == [first, first, second, second]
    even, odd = [[0.0, 2.0]] * 2, [[1.0, 3.0]] * 2
    assert [seen["pipeline"] for seen in ranks] == [even, odd, even, odd]
    assert [seen["gathered"] for seen in ranks] == [None, [[0.0, 1.0, 2.0, 3.0]] * 2, None, None]
    assert [seen.get("received") for seen in ranks] == [None, None, [[0.0], [0.0]], [[1.0], [1.0]]]
