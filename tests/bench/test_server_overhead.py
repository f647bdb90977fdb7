"""The server's benchmark end to end: two processes, a few streams."""

import json
import os

from nanovllm.cli.main import main


def test_a_small_run(capsys) -> None:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    options = "--streams 4 --tokens 5 --paced-streams 3 --paced-tokens 40 --pace-ms 10 --rounds 2 --json"
    assert main(["bench", "server-overhead", *options.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    first, second, middle = report["results"]
    assert (first["round"], second["round"], middle["round"]) == ("1", "2", "median")
    for name in ("tokens_per_s", "tokens_per_server_cpu_s", "added_ms_p99"):
        assert min(first[name], second[name]) <= middle[name] <= max(first[name], second[name])
        assert middle[name] > 0
    assert cores is None or os.sched_getaffinity(0) == cores, "this process may run where it could before"
