"""Engines whose ranks are Ray actors, on a real cluster of two nodes that each hold one rank."""

import os
import signal
import sys
from collections.abc import Iterator

import pytest

from nanovllm import LLM
from nanovllm.errors import ConfigError, EngineClosedError, EngineError
from tests.executor.processes import all_gone
from tests.executor.same_answers import CASES, answers, assert_abort_harms_no_other, assert_same
from tests.helpers import TEXT_MODEL, greedy_params, open_llm

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning"),
]

RAY_SETTINGS = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """The address of a cluster to which this process is not connected yet."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in RAY_SETTINGS.items():
            patch.setenv(name, value)
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        patch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster.address
        cluster.shutdown()


def open_ray(**options: object) -> LLM:
    return open_llm(TEXT_MODEL, distributed_executor_backend="ray", **options)


@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_answers_are_those_of_one_process(cluster: str, layout: str) -> None:
    import ray

    with open_llm(TEXT_MODEL) as one:
        wanted = {name: answers(one, params) for name, params in CASES.items()}
    with open_ray(**{layout: 2}) as llm:
        assert len(set(llm.llm_engine._core.executor._workers.nodes)) == 2
        for name, params in CASES.items():
            assert_same(answers(llm, params), wanted[name])
        assert_abort_harms_no_other(llm, wanted["greedy"])
        pids = llm.llm_engine._core.executor._workers.pids
    assert all_gone(pids)
    assert not ray.is_initialized()  # closing the engine disconnects from Ray


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_actor_ends_the_engine(cluster: str, number: int) -> None:
    llm = open_ray(tensor_parallel_size=2, worker_timeout=5)
    pids = llm.llm_engine._core.executor._workers.pids
    llm.add_request("x", greedy_params(200))
    for _ in range(5):
        llm.step()
    os.kill(pids[1], number)
    with pytest.raises(EngineError, match="rank 1 is gone" if number == signal.SIGKILL else "not answered for 5 s"):
        while True:
            llm.step()
    with pytest.raises(EngineClosedError):
        llm.generate("x", use_tqdm=False)
    assert all_gone(pids)
    llm.close()


def test_an_actor_lost_while_nothing_is_asked_is_noticed(cluster: str) -> None:
    llm = open_ray(tensor_parallel_size=2)
    pids = llm.llm_engine._core.executor._workers.pids
    llm.check_health()
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(EngineError, match="rank 0 is gone"):
        while True:
            llm.check_health()
    assert all_gone(pids)


def test_a_start_that_fails_raises_what_one_process_raises(cluster: str) -> None:
    with pytest.raises(ConfigError, match="dtype='float16': CPU kernels"):
        open_ray(tensor_parallel_size=2, dtype="float16")


def test_without_ray_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install nanovllm\[ray\]"):
        open_ray(tensor_parallel_size=2)
