"""Faults of a server with a real engine: the engine stalls, or the server gets SIGTERM under load."""

import asyncio
import signal
import threading

import httpx
import pytest

from tests.server.process import server_process

COMPLETIONS = "/v1/completions"
SHORT = {"prompt": [5, 6, 7], "max_tokens": 2}


async def status_becomes(client: httpx.AsyncClient, status: int) -> None:
    async with asyncio.timeout(60):
        while (await client.get("/health")).status_code != status:
            await asyncio.sleep(0.05)


@pytest.mark.anyio
async def test_a_stalled_engine_is_unhealthy_until_it_continues(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with server_process(tmp_path_factory.mktemp("model"), stall_seconds="0.5") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            server.engine.send_signal(signal.SIGSTOP)
            asking = asyncio.create_task(client.post(COMPLETIONS, json=SHORT))
            await status_becomes(client, 503)
            assert (await client.get("/version")).status_code == 200 and not asking.done()
            server.engine.send_signal(signal.SIGCONT)
            assert (await asking).status_code == 200
            await status_becomes(client, 200)


def test_sigterm_under_load(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Open requests are completed, later ones are refused, and the exit status is 0."""
    ends: list[str] = []
    begun = threading.Semaphore(0)
    body = {"prompt": [5, 6, 7], "max_tokens": 60, "ignore_eos": True}

    def ask(stream: bool) -> None:
        asked = {**body, "stream": stream}
        with httpx.stream("POST", server.url + COMPLETIONS, json=asked, timeout=60) as response:
            text = ""
            for line in response.iter_lines():
                begun.release()
                text += line
        ends.append("length" if '"finish_reason":"length"' in text else text)

    with server_process(tmp_path_factory.mktemp("model"), max_num_seqs="4") as server:
        threads = [threading.Thread(target=ask, args=(number % 4 != 0,)) for number in range(20)]
        for thread in threads:
            thread.start()
        begun.acquire()
        while server.metric("num_requests_running") + server.metric("num_requests_waiting") < 12:
            assert any(thread.is_alive() for thread in threads), "all were answered before the signal"
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(60)
        assert ends == ["length"] * 20
        assert server.process.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
        assert "Traceback" not in server.log()
