"""The requests of a load test: the same for a seed, read from files and traces, refused with the line that is wrong."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from nanovllm.bench.traces import (
    arrivals,
    file_requests,
    published_requests,
    random_requests,
    trace_requests,
)
from nanovllm.bench.workload import make_workload
from nanovllm.errors import ConfigError


def test_arrivals_follow_their_seed() -> None:
    times = arrivals(5000, rate=20.0, burstiness=1.0, seed=3)
    assert times == arrivals(5000, rate=20.0, burstiness=1.0, seed=3)
    assert times != arrivals(5000, rate=20.0, burstiness=1.0, seed=4)
    assert times[0] == 0 and times == sorted(times)
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, rel=0.05)  # as in an exponential distribution


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float) -> None:
    gaps = np.diff(arrivals(20_000, rate=5.0, burstiness=burstiness, seed=0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_random_requests() -> None:
    options = {"count": 200, "input_len": 100, "output_len": 10, "range_ratio": 0.2, "vocab_size": 50}
    found = random_requests(**options, seed=1)
    prompts = [request.make_prompt() for request in found]
    assert prompts == [request.make_prompt() for request in random_requests(**options, seed=1)]
    assert prompts != [request.make_prompt() for request in random_requests(**options, seed=2)]
    assert (min(map(len, prompts)), max(map(len, prompts))) == (80, 120)
    assert {request.output_len for request in found} == {8, 9, 10, 11, 12}
    assert {token for prompt in prompts for token in prompt} == set(range(50))
    exact = random_requests(count=3, input_len=7, output_len=2, range_ratio=0, seed=0)
    assert [(len(request.make_prompt()), request.output_len, request.due) for request in exact] == [(7, 2, None)] * 3


def test_published_requests_are_the_published_workload() -> None:
    found, workload = published_requests(count=256, seed=0), make_workload()
    assert [request.make_prompt() for request in found] == workload.prompts
    assert [request.output_len for request in found] == workload.output_lens


def test_requests_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Grüße"}\n\n{"prompt": [1, 2], "output_tokens": 5}\n', encoding="utf-8")
    found = file_requests(file, output_len=9)
    assert [(request.make_prompt(), request.output_len) for request in found] == [("Grüße", 9), ([1, 2], 5)]
    assert len(file_requests(file, output_len=9, count=1)) == 1
    with pytest.raises(ConfigError, match="line 3: token ids go to /v1/completions only"):
        file_requests(file, output_len=9, is_chat=True)
    messages = [{"role": "user", "content": "hi"}]
    file.write_text(json.dumps({"messages": messages}))
    assert file_requests(file, output_len=9, is_chat=True)[0].make_prompt() == messages
    with pytest.raises(ConfigError, match="messages to /v1/chat/completions only"):
        file_requests(file, output_len=9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "contains no request"),
        ("{", "line 1: "),
        ("[1]", "line 1: not a JSON object"),
        ('{"prompt": ""}', "line 1: needs"),
        ('{"prompt": [1, "a"]}', "line 1: needs"),
        ('{"text": "a"}', "line 1: needs"),
        ('{"prompt": "a"}\n{"prompt": "a", "output_tokens": 0}', "line 2: output_tokens=0 must be"),
    ],
)
def test_files_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        file_requests(file, output_len=1)


AZURE = """\
TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.4799600,3180,8
2023-11-16 18:17:04.2299600,110,27
"""
MOONCAKE = """\
{"timestamp": 0, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 27482, "input_length": 1536, "output_length": 26, "hash_ids": [46, 47, 2366]}
{"timestamp": 30535, "input_length": 700, "output_length": 7, "hash_ids": [9]}
"""


def test_azure_trace(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(AZURE)
    found = trace_requests(file, speedup=2.0, seed=5, vocab_size=100)
    assert [request.due for request in found] == pytest.approx([0.0, 0.125, 0.25], abs=1e-5)
    assert [(len(request.make_prompt()), request.output_len) for request in found] == [(4808, 10), (110, 27), (3180, 8)]
    assert found[0].make_prompt() == trace_requests(file, seed=5, vocab_size=100)[0].make_prompt()
    assert found[0].make_prompt()[:100] != found[2].make_prompt()[:100]
    assert [request.due for request in trace_requests(file, speedup=math.inf, limit=2)] == [None, None]


def test_mooncake_trace_shares_what_its_hashes_share(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(MOONCAKE)
    first, second, third = trace_requests(file)
    assert [request.due for request in (first, second, third)] == [0.0, 27.482, 30.535]
    one, two, three = (request.make_prompt() for request in (first, second, third))
    assert (len(one), len(two), len(three)) == (1100, 1536, 700)
    assert one[:1024] == two[:1024] and one[1024:1100] != two[1024:1100]
    assert three[:512] not in (one[:512], one[512:1024])
    assert first.make_prompt() == one
    assert trace_requests(file, seed=1)[0].make_prompt() != one


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column TIMESTAMP"),
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "contains no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2: TIMESTAMP='noon'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,0,1\n", "line 2: ContextTokens='0'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03,1\n", "line 2: GeneratedTokens=None"),
        ('{"timestamp": "x", "input_length": 1, "output_length": 1}', "line 1: timestamp='x'"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "line 1: timestamp=nan"),
        ('{"timestamp": 1, "input_length": 1.5, "output_length": 1}', "line 1: input_length=1.5"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}', "line 1: hash_ids"),
    ],
)
def test_traces_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "trace"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        trace_requests(file)
