"""llama.cpp in a Node process: what is asked of it, and how it is found. A Python program stands in for Node."""

import json
import sys
from pathlib import Path

import pytest

from nanovllm.bench.llamacpp import NODE, NODE_PROGRAM, PYTHON, open_peer, run_peer
from nanovllm.bench.workload import Workload, make_workload
from nanovllm.errors import NanoError

FAKE = """#!{python}
import json, pathlib, sys
if "--eval" in sys.argv:
    print("3.1.4 file:///package/index.js")
    sys.exit()
pathlib.Path({arguments!r}).write_text(json.dumps(sys.argv[1:]))
print("ready", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    assert len(asked["prompts"]) == len(asked["lengths"])
    if len(asked["prompts"]) > 2:
        sys.exit(7)
    made = [length - (len(prompt) == 9) for prompt, length in zip(asked["prompts"], asked["lengths"])]
    print(json.dumps(made), flush=True)
"""


def workload(num_seqs: int, input_len: int) -> Workload:
    sizes = (input_len, input_len), (4, 4)
    return make_workload(
        num_seqs=num_seqs, input_len=sizes[0], output_len=sizes[1], seed=0, vocab_size=50, temperature=0.0
    )


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the arguments of the program that the peer runs."""
    path = tmp_path / "arguments"
    node = tmp_path / "bin" / "node"
    node.parent.mkdir()
    node.write_text(FAKE.format(python=sys.executable, arguments=str(path)))
    node.chmod(0o755)
    monkeypatch.setenv("PATH", str(node.parent))
    return path


def test_it_generates_workloads(arguments: Path) -> None:
    workloads = [workload(2, 6), workload(1, 20)]
    peer = open_peer(None, Path("model.gguf"), 3, workloads)
    assert (peer.name, peer.version) == (NODE, "3.1.4")
    for each in workloads:
        run_peer(peer, each)
    peer.close()
    program, *rest = json.loads(arguments.read_text())
    assert Path(program) == NODE_PROGRAM and NODE_PROGRAM.exists()
    assert rest == ["file:///package/index.js", "model.gguf", "3", "2", str(20 + 4 + 8)]


def test_wrong_lengths_are_an_error(arguments: Path) -> None:
    peer = open_peer(NODE, Path("model.gguf"), 1, [workload(2, 9)])
    with pytest.raises(NanoError, match=r"outputs of \[3, 3\] tokens instead of \[4, 4\]"):
        run_peer(peer, workload(2, 9))
    peer.close()


def test_an_end_of_the_process_is_an_error(arguments: Path) -> None:
    peer = open_peer(NODE, Path("model.gguf"), 1, [workload(3, 6)])
    with pytest.raises(NanoError, match="exit code 7"):
        run_peer(peer, workload(3, 6))
    peer.close()


@pytest.mark.parametrize(("name", "commands"), [(None, ["npm", "pip"]), (NODE, ["npm"]), (PYTHON, ["pip"])])
def test_how_to_get_one(name: str | None, commands: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("nanovllm.bench.llamacpp.importlib.util.find_spec", lambda name: None)
    with pytest.raises(NanoError) as caught:
        open_peer(name, Path("model.gguf"), 1, [workload(1, 6)])
    assert [command for command in ("npm", "pip") if f"{command} install" in str(caught.value)] == commands
