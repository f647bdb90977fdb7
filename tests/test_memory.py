"""Closing an engine frees its memory, loading needs the memory of one model, and two engines do not interfere."""

import gc
import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers

from nanovllm import LLM, SamplingParams
from nanovllm.errors import EngineClosedError, EngineError
from tests.helpers import TEXT_MODEL, assert_greedy, greedy_params, open_llm, prompt_of, scheduler_of

MIB = 2**20


def make_checkpoint(folder: Path, num_layers: int) -> int:
    """Write a model of about 37 MiB per layer in float32 with a very small embedding; returns its size in bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(0.01)
    model.save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def run_once(folder: Path) -> None:
    with open_llm(folder) as llm:
        llm.generate([prompt_of(20, vocab_size=256)] * 3, greedy_params(3), use_tqdm=False)


def resident() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def live_tensors() -> set[int]:
    return {id(found) for found in gc.get_objects() if type(found) is torch.Tensor}


@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_closing_frees_tensors_without_a_garbage_collection(family: str) -> None:
    """Weights in a cycle of references would stay until the collector runs, which may be long after."""
    params = SamplingParams(temperature=0.8, top_p=0.9, logprobs=1, max_tokens=3)
    for collects in (True, False):  # the first engine makes what is made once per process
        gc.collect()
        before = live_tensors()
        gc.enable() if collects else gc.disable()
        try:
            with open_llm(family) as llm:
                llm.generate([prompt_of(20)] * 3, params, use_tqdm=False)
                assert live_tensors() - before
            left = live_tensors() - before
        finally:
            gc.enable()
    assert not left


def test_open_and_close_leave_nothing_behind(tmp_path: Path) -> None:
    size = make_checkpoint(tmp_path, num_layers=2)
    assert size > 60 * MIB
    for _ in range(2):  # until allocators and thread pools no longer grow
        run_once(tmp_path)
    before, used = resident(), []
    for _ in range(6):
        run_once(tmp_path)
        used.append(resident())
    assert min(used[3:]) - before < size, "four engines or more: what allocators keep comes and goes, a leak stays"


def test_the_next_engine_takes_the_place_of_the_closed_one(tmp_path: Path) -> None:
    """Even while the closed engines' objects exist. A leak adds up; what allocators keep varies but does not grow."""
    size = make_checkpoint(tmp_path, num_layers=2)
    closed, used = [], []
    for _ in range(6):
        with open_llm(tmp_path) as llm:
            llm.generate([5], greedy_params(2), use_tqdm=False)
            used.append(resident())
        closed.append(llm)
    assert used[-1] - used[1] < size, "four engines after the second, which lets allocators settle"
    assert all(llm.is_finished() for llm in closed)


MEASURE_LOADING = """
    import json, sys

    import torch
    import nanovllm.llm
    import nanovllm.runner.model_runner

    def peak():
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

    torch.ones(64, 64) @ torch.ones(64, 64)
    before = peak()
    options = json.loads(sys.argv[2])
    llm = nanovllm.llm.LLM(sys.argv[1], device="cpu", dtype="float32", skip_tokenizer_init=True, **options)
    print(peak() - before)
"""


@pytest.mark.parametrize("sharded", [False, True])
def test_loading_takes_one_models_worth(tmp_path: Path, sharded: bool) -> None:
    size = make_checkpoint(tmp_path, num_layers=4)
    assert size > 120 * MIB
    if sharded:
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        model.save_pretrained(tmp_path, max_shard_size="40MB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 3
    options = {"max_model_len": 64, "num_kv_cache_blocks": 4, "kv_cache_block_size": 16, "max_num_seqs": 4}
    command = [sys.executable, "-c", textwrap.dedent(MEASURE_LOADING), str(tmp_path), json.dumps(options)]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    assert size <= int(done.stdout) < size * 1.3


def test_two_engines_at_once() -> None:
    """Two engines of different families and sizes, with interleaved steps."""
    prompts = [prompt_of(20), prompt_of(33)]
    with open_llm("qwen3") as one, open_llm("mistral", overlap=True, kv_cache_block_size=32) as two:
        done: dict[str, list[list[int]]] = {"qwen3": [], "mistral": []}
        for llm in (one, two):
            for prompt in prompts:
                llm.add_request(prompt, greedy_params(15))
        while not (one.is_finished() and two.is_finished()):
            for name, llm in (("qwen3", one), ("mistral", two)):
                done[name] += [output["token_ids"] for output in llm.step()]
        one.close()
        (later,) = two.generate(prompts[0], greedy_params(15), use_tqdm=False)
    assert later["token_ids"] == done["mistral"][0]
    for name, answers in done.items():
        for prompt, tokens in zip(prompts, answers, strict=True):
            assert_greedy(name, prompt, tokens)


# --- after close and after failures -----------------------------------------------------------------------------------


def assert_closed(llm: LLM, message: str) -> None:
    attempts: list[Any] = [
        lambda: llm.generate("text", use_tqdm=False),
        lambda: llm.add_request([5]),
        lambda: llm.step(),
        lambda: next(llm.stream("text")),
        lambda: llm.chat([{"role": "user", "content": "text"}], use_tqdm=False),
        lambda: llm.reset_prefix_cache(),
    ]
    for attempt in attempts:
        with pytest.raises(EngineClosedError, match=message):
            attempt()
    assert llm.is_finished()
    llm.abort("anything")
    llm.close()


def test_a_closed_engine_says_so() -> None:
    llm = open_llm(TEXT_MODEL)
    llm.add_request("still running")
    llm.close()
    assert_closed(llm, "the engine was closed")


def test_closing_within_a_stream() -> None:
    llm = open_llm(TEXT_MODEL)
    stream = llm.stream("text", greedy_params(20))
    next(stream)
    llm.close()
    with pytest.raises(EngineClosedError):
        next(stream)


def test_the_context_manager_closes_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), open_llm(TEXT_MODEL) as llm:
        raise ZeroDivisionError
    assert_closed(llm, "the engine was closed")


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_closes_the_engine_and_names_the_cause(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm(TEXT_MODEL, overlap=overlap)
    llm.generate("first", greedy_params(3), use_tqdm=False)

    def broken(plan: object) -> None:
        raise RuntimeError("the device is on fire")

    monkeypatch.setattr(llm.llm_engine._core.executor, "launch", broken)
    with pytest.raises(EngineError, match="a step failed and the engine is closed: RuntimeError: the device") as raised:
        llm.generate("second", use_tqdm=False)
    assert isinstance(raised.value.__cause__, RuntimeError)
    assert_closed(llm, "closed by an earlier failure: RuntimeError: the device is on fire")


def test_the_cause_is_named_also_where_closing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an illegal access on a GPU, when freeing memory fails too."""
    llm = open_llm(TEXT_MODEL)

    def fail(message: str) -> None:
        raise RuntimeError(message)

    monkeypatch.setattr(llm.llm_engine._core.executor, "launch", lambda plan: fail("the device is on fire"))
    monkeypatch.setattr(llm.llm_engine._core.executor, "close", lambda: fail("it burns still"))
    with pytest.raises(EngineError, match="the engine is closed: RuntimeError: the device is on fire") as raised:
        llm.generate("text", use_tqdm=False)
    assert raised.value.__cause__.__notes__ == ["Closing the engine failed too: RuntimeError: it burns still"]
    assert_closed(llm, "closed by an earlier failure: RuntimeError: the device is on fire")


def test_a_failure_to_open_leaves_no_memory_behind(tmp_path: Path) -> None:
    size = make_checkpoint(tmp_path, num_layers=2)
    run_once(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3}))
    used = []
    for _ in range(10):  # a leak adds up; memory kept by allocators varies by tens of megabytes but does not grow
        with pytest.raises(ValueError, match="9 missing"):
            open_llm(tmp_path)
        used.append(resident())
    assert used[-1] - used[0] < size, "after the first, which lets allocators settle"


def test_the_scheduler_is_idle_between_calls() -> None:
    with open_llm(TEXT_MODEL, overlap=True) as llm:
        llm.generate(["a", "b", "c"], greedy_params(9), use_tqdm=False)
        assert scheduler_of(llm).num_unfinished == 0
        assert not llm.llm_engine._requests and not llm.llm_engine._of_seq and not llm.llm_engine._watched
