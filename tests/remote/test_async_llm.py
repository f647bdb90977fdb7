"""`AsyncLLM` with its engine in a child process or a thread: the same answers as `LLM`, and no lost request."""

import asyncio
import os
import signal
import time
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import psutil
import pytest

from nanovllm import LLM, AsyncLLM, RequestOutput
from nanovllm.engine.deltas import Delta
from nanovllm.errors import RequestError
from nanovllm.remote.messages import BLOCK_CACHED, BLOCK_FREE, BLOCK_IN_USE, EngineView
from tests.helpers import TEXT_MODEL, greedy_params, model_dir, open_llm, reference
from tests.remote.async_engine import ENDLESS, OPTIONS, TEXTS, last, start


class Host:
    """An engine and the event loop it runs in."""

    def __init__(self, runner: asyncio.Runner, engine: AsyncLLM) -> None:
        self.runner = runner
        self.engine = engine

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(asyncio.wait_for(work, 60))


@pytest.fixture(scope="module", params=["process", "thread"])
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    with asyncio.Runner() as runner:
        engine = runner.run(start(in_process=request.param == "thread"))
        yield Host(runner, engine)
        runner.run(engine.close())


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(TEXT_MODEL, cpu_kernels=OPTIONS["cpu_kernels"]) as llm:
        yield llm


async def eventually_idle(engine: AsyncLLM) -> None:
    """Assert that no request is left and that all blocks are free or cached."""
    stats = await engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks + stats.num_cached_blocks == stats.num_blocks


def facts(output: RequestOutput) -> Any:
    parts = [(p.index, p.text, p.token_ids, p.finish_reason, p.stop_reason) for p in output.outputs]
    return output.prompt, output.prompt_token_ids, parts


# --- the same answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"n": 2},
        {"stop": ["e", "a b"]},
        {"stop": ["e"], "include_stop_str_in_output": True},
        {"detokenize": False},
        {"max_tokens": 1},
        {"temperature": 0.8, "seed": 7, "n": 3},
    ],
    ids=str,
)
def test_answers_are_those_of_llm(host: Host, llm: LLM, settings: dict[str, Any]) -> None:
    params = greedy_params(24).clone(**settings)

    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*[last(host.engine.generate(text, params)) for text in TEXTS])

    expected = llm.generate(TEXTS, params, use_tqdm=False)
    assert list(map(facts, host.run(ask()))) == list(map(facts, expected))


def test_many_at_once(host: Host, llm: LLM) -> None:
    prompts = [f"{text} {number}" for number in range(12) for text in TEXTS]

    async def ask() -> list[RequestOutput]:
        return await asyncio.gather(*[last(host.engine.generate(prompt, greedy_params(10))) for prompt in prompts])

    expected = llm.generate(prompts, greedy_params(10), use_tqdm=False)
    assert [output["text"] for output in host.run(ask())] == [output["text"] for output in expected]
    host.run(eventually_idle(host.engine))


def test_outputs_grow_and_stay_as_they_were(host: Host) -> None:
    async def ask() -> list[RequestOutput]:
        return [output async for output in host.engine.generate(TEXTS[0], greedy_params(12), "mine")]

    outputs = host.run(ask())
    assert len(outputs) > 3
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for before, after in zip(outputs, outputs[1:], strict=False):
        assert after.request_id == "mine"
        assert after["text"].startswith(before["text"])
        assert after["token_ids"][: len(before["token_ids"])] == before["token_ids"]
        assert len(after["token_ids"]) > len(before["token_ids"])


def test_deltas_add_up(host: Host, llm: LLM) -> None:
    (expected,) = llm.generate([TEXTS[0]], params := greedy_params(12, n=2, logprobs=2), use_tqdm=False)

    async def ask() -> list[Delta]:
        return [d async for d in host.engine.submit(expected.prompt_token_ids, params, request_id="d")]

    deltas = host.run(ask())
    for index, part in enumerate(expected.outputs):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == part.text
        assert [token for delta in own for token in delta.token_ids] == part.token_ids
        assert [delta.finish_reason for delta in own] == [None] * (len(own) - 1) + ["length"]
        for delta in own:
            assert delta.logprobs is not None
            assert [scores.token_ids[0] for scores in delta.logprobs] == delta.token_ids
            assert all(len(scores.token_ids) == len(scores.tokens) == 3 for scores in delta.logprobs)


def test_logprobs(host: Host, llm: LLM) -> None:
    params = greedy_params(8, logprobs=3, prompt_logprobs=2)
    (expected,) = llm.generate([TEXTS[0]], params, use_tqdm=False)
    output = host.run(last(host.engine.generate(TEXTS[0], params)))
    assert output.outputs[0].logprobs == expected.outputs[0].logprobs
    assert output.outputs[0].cumulative_logprob == pytest.approx(expected.outputs[0].cumulative_logprob)
    assert output.prompt_logprobs == expected.prompt_logprobs


def test_forms_of_a_prompt(host: Host) -> None:
    assert host.engine.tokenizer is not None
    ids = host.engine.tokenizer.encode(TEXTS[0])
    texts = set()
    for form in (TEXTS[0], ids, tuple(ids), {"prompt": TEXTS[0], "cache_salt": "s"}, {"prompt_token_ids": ids}):
        texts.add(host.run(last(host.engine.generate(form, greedy_params(6))))["text"])
    assert len(texts) == 1


def test_a_long_text_is_tokenized_off_the_loop(host: Host) -> None:
    with pytest.raises(RequestError, match="max_model_len"):
        host.run(last(host.engine.generate("word " * 5000, greedy_params(6))))


def test_chat(host: Host, llm: LLM) -> None:
    messages = [{"role": "user", "content": "How many?"}]
    (expected,) = llm.chat(messages, greedy_params(8), use_tqdm=False)
    assert facts(host.run(last(host.engine.chat(messages, greedy_params(8))))) == facts(expected)


def test_prefix_cache_is_used_and_reset(host: Host) -> None:
    text = "The same long beginning of a story, again and again. " * 3

    async def cached() -> int:
        return (await last(host.engine.generate(text, greedy_params(2)))).num_cached_tokens

    host.run(host.engine.reset_prefix_cache())
    assert host.run(cached()) == 0
    assert host.run(cached()) > 0
    host.run(host.engine.reset_prefix_cache())
    assert host.run(cached()) == 0


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embedding_is_the_models_hidden_state(host: Host, pooling: str) -> None:
    import torch

    assert host.engine.tokenizer is not None
    ids = host.engine.tokenizer.encode(TEXTS[3] * 4)
    with torch.inference_mode():
        hidden = reference(TEXT_MODEL).model(torch.tensor([ids])).last_hidden_state[0]
    expected = hidden[-1] if pooling == "last" else hidden.mean(dim=0)
    expected = expected / expected.norm()

    async def embed_beside_a_request() -> list[float]:
        async with aclosing(host.engine.generate(TEXTS[0], ENDLESS)) as outputs:
            await anext(outputs)
            return await host.engine.embed(ids, pooling)

    found = torch.tensor(host.run(embed_beside_a_request()))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    host.run(eventually_idle(host.engine))


# --- refused and aborted requests -------------------------------------------------------------------------------------


def test_a_refused_request_harms_no_other(host: Host) -> None:
    async def ask() -> None:
        async with aclosing(host.engine.generate(TEXTS[0], greedy_params(40))) as outputs:
            await anext(outputs)
            for prompt, message in [([], "empty"), ([10**6], "vocabulary"), ([1] * 300, "max_model_len")]:
                with pytest.raises(RequestError, match=message):
                    await last(host.engine.generate(prompt))
            with pytest.raises(RequestError, match="SamplingParams"):
                await last(host.engine.generate(TEXTS[0], {"n": 1}))  # type: ignore[arg-type]
            with pytest.raises(RequestError, match="'colour'"):
                await last(host.engine.generate({"colour": 1}))
            with pytest.raises(RequestError, match="pooling"):
                await host.engine.embed([1], "sum")
            with pytest.raises(RequestError, match="0 tokens"):
                await host.engine.embed([], "mean")
            assert (await last(outputs)).finished

    host.run(ask())


def test_a_name_in_use_is_refused(host: Host) -> None:
    async def ask() -> None:
        async with aclosing(host.engine.generate(TEXTS[0], ENDLESS, "same")) as outputs:
            await anext(outputs)
            with pytest.raises(RequestError, match="same"):
                await last(host.engine.generate(TEXTS[0], ENDLESS, "same"))

    host.run(ask())


def test_a_name_can_be_used_again_at_once(host: Host) -> None:
    async def ask() -> None:
        for _ in range(5):
            async with aclosing(host.engine.generate(TEXTS[0], ENDLESS, "same")) as outputs:
                await anext(outputs)
        short = await last(host.engine.generate(TEXTS[1], greedy_params(5), "same"))
        assert len(short["token_ids"]) == 5
        other = await last(host.engine.generate(TEXTS[1], greedy_params(5)))
        assert short["text"] == other["text"]

    host.run(ask())


def test_leaving_the_loop_frees_the_blocks(host: Host) -> None:
    async def ask() -> None:
        async with aclosing(host.engine.generate(TEXTS[0], ENDLESS)) as outputs:
            async for _ in outputs:
                assert (await host.engine.stats()).num_running == 1
                break
        await eventually_idle(host.engine)

    host.run(ask())


def test_cancelling_frees_the_blocks(host: Host) -> None:
    async def ask() -> None:
        tasks = [asyncio.create_task(last(host.engine.generate(text, ENDLESS))) for text in TEXTS * 4]
        while not (await host.engine.stats()).num_running:
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert all(task.cancelled() for task in tasks)
        await eventually_idle(host.engine)

    host.run(ask())


def test_abort_finishes_the_iterator(host: Host) -> None:
    async def ask() -> None:
        async with aclosing(host.engine.generate(TEXTS[0], ENDLESS.clone(n=2), "gone")) as outputs:
            first = await anext(outputs)
            assert not first.finished
            await host.engine.abort(["gone", "unknown"])
            output = await last(outputs)
            assert [part.finish_reason for part in output.outputs] == ["abort", "abort"]
        await host.engine.abort("gone")
        await eventually_idle(host.engine)

    host.run(ask())


def test_a_slow_consumer_holds_up_nobody(host: Host, llm: LLM) -> None:
    params = greedy_params(60, logprobs=0)

    async def ask() -> list[RequestOutput]:
        async with aclosing(host.engine.generate(TEXTS[0], params)) as outputs:
            first = await anext(outputs)
            while (await host.engine.stats()).num_running:  # the request goes on while its output is not read
                await last(host.engine.generate(TEXTS[1], greedy_params(4)))
            return [first] + [output async for output in outputs]

    outputs = host.run(ask())
    assert len(outputs) == 2, "what was not taken in time comes in one piece"
    (expected,) = llm.generate([TEXTS[0]], params, use_tqdm=False)
    assert facts(outputs[-1]) == facts(expected)
    assert [list(entry) for entry in outputs[-1].outputs[0].logprobs or ()] == [[t] for t in expected["token_ids"]]


# --- stats, views, health ---------------------------------------------------------------------------------------------


def test_stats_count(host: Host) -> None:
    before = host.run(host.engine.stats())
    output = host.run(last(host.engine.generate(TEXTS[0], greedy_params(9))))
    after = host.run(host.engine.stats())
    assert after.num_generation_tokens - before.num_generation_tokens == 9
    assert after.num_prompt_tokens - before.num_prompt_tokens == len(output.prompt_token_ids)
    assert after.num_blocks == OPTIONS["num_kv_cache_blocks"]


def test_view(host: Host) -> None:
    async def look() -> tuple[list[EngineView], RequestOutput]:
        views = []
        await host.engine.reset_prefix_cache()
        async with (
            aclosing(host.engine.view()) as feed,
            aclosing(host.engine.generate("Look " * 20, ENDLESS)) as outputs,
        ):
            views.append(await anext(feed))
            await anext(outputs)
            began = time.monotonic()
            while not views[-1].running:
                views.append(await anext(feed))
            output = await last(outputs)
            while views[-1].running:
                views.append(await anext(feed))
            assert len(views) <= 10 * (time.monotonic() - began) + 4
        return views, output

    views, output = host.run(look())
    idle, end = views[0], views[-1]
    assert set(idle.blocks) == {BLOCK_FREE} and not any(idle.owners) and not idle.running
    busy = next(view for view in views if view.running)
    (shown,) = busy.running
    assert shown.owner and busy.owners.count(shown.owner) == busy.blocks.count(BLOCK_IN_USE) > 0
    assert end.blocks.count(BLOCK_CACHED) == end.stats.num_cached_blocks > 0
    steps = [step for view in views for step in view.steps]
    assert steps[0].num_prefill_tokens == shown.num_prompt
    assert sum(step.num_decodes for step in steps) == len(output["token_ids"]) - 1
    assert [step.seconds for step in steps] == sorted(step.seconds for step in steps)


def test_idle_is_healthy(host: Host) -> None:
    host.run(host.engine.check_health())
    host.run(host.engine.check_health())


def test_facts_about_the_model(host: Host, llm: LLM) -> None:
    assert host.engine.max_model_len == 256
    assert host.engine.model_config == llm.model_config
    assert host.engine.model_name == str(model_dir(TEXT_MODEL))


# --- the engine process -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["process"], indirect=True)
def test_signals_for_the_group_leave_the_engine_to_its_parent(host: Host) -> None:
    assert host.engine.pid is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(host.engine.pid, number)
    assert host.run(last(host.engine.generate(TEXTS[0], greedy_params(4)))).finished


@pytest.mark.parametrize("host", ["process"], indirect=True)
def test_an_idle_engine_uses_no_cpu(host: Host) -> None:
    process = psutil.Process(host.engine.pid)
    host.run(last(host.engine.generate(TEXTS[0], greedy_params(4))))
    time.sleep(0.5)  # torch's threads spin for a short time before they sleep
    before = process.cpu_times()
    time.sleep(1)
    after = process.cpu_times()
    assert after.user + after.system - before.user - before.system <= 0.01  # one tick of the clock
