"""The Ray Serve application on a local Ray: responses, routing by prefix, and the loss of a replica."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import openai
import psutil
import pytest
import yaml

from nanovllm import SamplingParams
from nanovllm.errors import ConfigError
from tests.helpers import TEXT_MODEL, model_dir, open_llm

ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "How many?"}], "temperature": 0}
OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "num_kv_cache_blocks": 256,
    "kv_cache_block_size": 16,
}
LONG = 400  # tokens
PATIENCE = 120.0  # seconds; a replica takes ten to start on a busy machine

pytestmark = pytest.mark.filterwarnings("ignore")  # Ray's own


class Application:
    """`app` with two engines on a separate local Ray."""

    def __init__(self) -> None:
        import ray
        from ray import serve

        from nanovllm.server.ray_app import app

        self.name = f"tiny-{uuid4().hex[:8]}"
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {"model": str(model_dir(TEXT_MODEL)), "engine": OPTIONS, "server": {"served_model_name": ["tiny"]}}
        serve.run(app({**args, "replicas": 2}), name=self.name)

    def engines(self) -> list[psutil.Process]:
        """The Serve replicas that have a running engine."""
        title = f"ServeReplica:{self.name}:Engine"
        return [process for process in psutil.process_iter() if title in _command(process) and process.children()]

    def metric(self, name: str) -> float:
        text = httpx.get(self.url + "/metrics", timeout=30).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}{{"))

    def close(self) -> None:
        import ray
        from ray import serve

        serve.shutdown()
        ray.shutdown()


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def served() -> Iterator[Application]:
    application = Application()
    yield application
    application.close()


def test_it_responds_as_the_engine_does(served: Application) -> None:
    with open_llm(TEXT_MODEL, **OPTIONS) as llm:
        params = SamplingParams(temperature=0, max_tokens=32)
        expected = llm.chat(HELLO["messages"], params, use_tqdm=False)[0]["text"]
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(model="tiny", max_tokens=32, **HELLO)
        parts = list(client.chat.completions.create(model="tiny", max_tokens=32, stream=True, **HELLO))
        assert whole.choices[0].message.content == expected
        texts = [part.choices[0].delta.content for part in parts if part.choices and part.choices[0].delta.content]
        assert "".join(texts) == expected and len(texts) > 1  # a slow reader gets several tokens at once
        several = client.completions.create(model="tiny", prompt=["a b", "c d", "e f"] * 4, max_tokens=5)
        assert len(several.choices) == 12
        vectors = client.embeddings.create(model="tiny", input=["one", "two"]).data
        assert vectors[0].embedding != vectors[1].embedding
    assert httpx.get(served.url + "/health", timeout=30).status_code == 200
    with httpx.stream("GET", served.url + "/engine/events", timeout=30) as response:
        assert json.loads(next(response.iter_lines()).removeprefix("data: "))["stats"]["num_blocks"] == 256
    assert served.metric("num_preemptions_total") == 0


def test_the_same_beginning_goes_to_the_same_replica(served: Application) -> None:
    def num_cached(story: str) -> int:
        body = {"prompt": story, "max_tokens": 2}
        usage = httpx.post(served.url + "/v1/completions", json=body, timeout=30).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    stories = [f"{name} went for a long walk through the woods and over the hills. " * 2 for name in "ABCDEF"]
    assert [num_cached(story + "One") for story in stories] == [0] * 6
    assert all([num_cached(story + "Two") >= 32 for story in stories])


def test_disconnecting_aborts_the_request(served: Application) -> None:
    before = served.metric("generation_tokens_total")
    body = {**HELLO, "max_tokens": LONG, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", served.url + CHAT, json=body, timeout=30) as response:
        next(response.iter_lines())
    wait_until(lambda: served.metric("num_requests_running") == 0)
    assert served.metric("generation_tokens_total") - before < LONG


def test_a_killed_replica_fails_only_its_own_requests(served: Application) -> None:
    wait_until(lambda: len(served.engines()) == 2)
    begun = threading.Barrier(7)
    ends: list[str] = []

    def ask(number: int) -> None:
        body = {"prompt": f"{number} " * 20, "max_tokens": LONG, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            begun.wait(60)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        ends.append("lost" if "engine_dead" in rest[-2] else "whole")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    begun.wait(60)
    victim, _ = served.engines()
    (child,) = victim.children()
    victim.kill()
    for number in range(4):  # whichever replica they are sent to
        body = {"prompt": f"{number} " * 20, "max_tokens": 3}
        assert httpx.post(served.url + "/v1/completions", json=body, timeout=60).status_code == 200
    for thread in threads:
        thread.join(60)
    assert sorted(set(ends)) == ["lost", "whole"] and len(ends) == 6
    assert httpx.get(served.url + "/health", timeout=30).status_code == 200
    wait_until(lambda: not child.is_running())
    wait_until(lambda: len(served.engines()) == 2)


def test_an_engine_that_ends_is_replaced(served: Application) -> None:
    wait_until(lambda: len(served.engines()) == 2)
    replica, _ = served.engines()
    replica.children()[0].kill()
    wait_until(lambda: not replica.is_running())
    assert httpx.post(served.url + CHAT, json={**HELLO, "max_tokens": 3}, timeout=60).status_code == 200
    wait_until(lambda: len(served.engines()) == 2)


# --- building the application -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({"modle": "x"}, "modle"),
        ({"replicas": "many"}, "replicas"),
        ({"engine": {"max_seqs": 3}}, "max_num_seqs"),
        ({"engine": {"kvcache_block_size": 8}}, "kv_cache_block_size=8: must be a multiple of 16"),
        ({"engine": {"kvcache_block_size": 16, "kv_cache_block_size": 32}}, "two spellings"),
        ({"server": {"port": 80}}, "port"),
        ({"server": {"colour": "red"}}, "colour"),
        ({"server": {"max_body_bytes": 0}}, "max_body_bytes"),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], told: str) -> None:
    from nanovllm.server.ray_app import app

    with pytest.raises(ConfigError, match=told):
        app(args)


def test_the_ready_config_file_is_what_ray_serve_reads() -> None:
    from ray.serve.schema import ServeDeploySchema

    from nanovllm.server.ray_app import app

    config = yaml.safe_load((ROOT / "examples" / "ray_serve.yaml").read_text())
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    assert application["import_path"] == "nanovllm.server.ray_app:app"
    app(application["args"])


def test_without_ray_the_remedy_is_named(tmp_path: Path) -> None:
    script = "import sys\nsys.modules['ray'] = None\nimport nanovllm.server.ray_app"
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert done.returncode == 1 and "pip install 'nanovllm[ray]'" in done.stderr
