"""Options: derived from Config and SamplingParams; every mistake gives a one-line error and exit code 2."""

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest

from nanovllm import __version__
from nanovllm.cli.main import _parser, main
from nanovllm.config import Config
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.settings import ServerSettings

Cli = Callable[..., subprocess.CompletedProcess[str]]

COMMANDS = [
    ["generate", "prompt"],
    ["chat"],
    ["plan"],
    ["bench", "throughput"],
    ["bench", "latency"],
    ["bench", "startup"],
    ["bench", "compare-transformers"],
    ["bench", "compare-llamacpp"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_every_engine_option(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--help"]) == 0
    text = capsys.readouterr().out
    missing = [field.name for field in fields(Config) if f"--{field.name.replace('_', '-')} " not in text]
    assert [name for name in missing if f"--no-{name.replace('_', '-')}" not in text] == []
    assert "lowered to the model's own limit" in " ".join(text.split())  # from the help of max_model_len


def is_sentence(text: str) -> bool:
    return text[0].isupper() and text.endswith(".") and len(text.split()) >= 3


@pytest.mark.parametrize("cls", [Config, SamplingParams, ServerSettings])
def test_every_field_has_a_help_sentence(cls: type) -> None:
    assert [field.name for field in fields(cls) if not is_sentence(field.metadata["help"])] == []


def test_every_argument_of_every_command_has_a_help_sentence() -> None:
    parsers, seen = [_parser()], 0
    while parsers:
        for action in parsers.pop()._actions:
            if isinstance(action, argparse._SubParsersAction):
                parsers += action.choices.values()
            elif action.help != argparse.SUPPRESS and not isinstance(
                action, argparse._HelpAction | argparse._VersionAction
            ):
                seen += 1
                assert is_sentence(action.help or "?"), f"{action.option_strings}: {action.help}"
    assert seen > 300


def test_serve_help_shows_what_an_option_does_and_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    text = "".join(capsys.readouterr().out.split())  # argparse breaks lines at spaces and at hyphens
    for cls in (Config, ServerSettings):
        for field in fields(cls):
            default = "" if field.default in (None, ()) else f" Default: {field.default}."
            assert (field.metadata["help"] + default).replace(" ", "") in text
    expected = "Maximum number of tokens computed in one step, prompt and generated tokens together."
    assert expected.replace(" ", "") in text


def test_help_teaches_and_loads_nothing_heavy(cli: Cli) -> None:
    script = (
        "import sys\nfrom nanovllm.cli.main import main\ncode = main(['--help'])\n"
        "heavy = {'torch', 'numpy', 'tqdm', 'huggingface_hub', 'tokenizers', 'transformers'} & sys.modules.keys()\n"
        "sys.exit(str(heavy) if heavy else code)"
    )
    root = Path(__file__).parent.parent.parent
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for word in (
        "generate",
        "chat",
        "bench",
        "plan",
        "examples:",
        'nanovllm generate "What is the capital of Germany?"',
    ):
        assert word in done.stdout


def test_version(cli: Cli) -> None:
    done = cli("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nanovllm {__version__}\n", "")


def test_no_command_shows_the_help(cli: Cli) -> None:
    done = cli()
    assert (done.returncode, done.stdout) == (2, "")
    assert "examples:" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["generate", "x", "--max-token", "5"], "unknown option --max-token; did you mean --max-tokens?"),
        (["generate", "x", "--max-modl-len=5"], "unknown option --max-modl-len; did you mean --max-model-len?"),
        (["generate", "x", "--zzz"], "unknown option --zzz; 'nanovllm generate --help' lists them all"),
        (["bench", "latency", "--batch-size", "5"], "did you mean --batch-sizes?"),
        (["generate", "two", "words"], "unexpected argument 'words': put a text of several words in quotes"),
        (["generate"], "required: PROMPT"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x", "--raw", "--system", "s"], "--system needs the chat template"),
        (["generat", "x"], "invalid choice: 'generat'"),
        (["generate", "x", "--max-model-len", "many"], "invalid int value: 'many'"),
        (["generate", "x", "--max-model-len", "0"], "max_model_len=0: must be an integer of at least 1"),
        (["generate", "x", "--device", "gpu"], "device='gpu': must be one of auto, cpu, cuda"),
        (["generate", "x", "--kv-cache-memory-bytes", "2X"], "'2X' is not a number of bytes"),
        (["generate", "x", "--temperature", "-1"], "temperature=-1.0: must be a finite number"),
        (["generate", "x", "--temperature", "nan"], "temperature=nan: must be a finite number"),
        (["generate", "x", "--max-tokens", "0"], "max_tokens=0: must be an integer of at least 1"),
        (["generate", "x", "--chat-template-kwargs", "[1]"], "is not a JSON object"),
        (["chat", "--chat-template-kwargs", "{"], "is not JSON"),
        (["plan", "a", "--model", "b"], "two models: a and --model b; give one"),
        (["bench", "throughput", "--input-len", "9:3"], "the first number must not exceed the second"),
        (["bench", "throughput", "--num-seqs", "0"], "'0' must be an integer of at least 1"),
        (["bench", "latency", "--batch-sizes", "1,x"], "'x' must be an integer of at least 1"),
        (["bench", "latency", "--output-len", "2"], "output_len=2: must be at least 3"),
        (["bench", "speed"], "invalid choice: 'speed'"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_mistake_is_told_in_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert err.startswith("nanovllm") and err.count("\n") == 1


def test_mistake_through_a_process(cli: Cli) -> None:
    done = cli("generate", "x", "--max-token", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "nanovllm generate: error: unknown option --max-token; did you mean --max-tokens?\n"


def test_empty_stdin_is_refused(cli: Cli) -> None:
    done = cli("generate", "-", stdin="\n")
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "nanovllm generate: error: the prompt is empty\n")


def test_missing_model_is_told_in_one_line(cli: Cli) -> None:
    for command in (["generate", "x"], ["plan"], ["bench", "startup"]):
        done = cli(*command, "--model", "no/such/model/anywhere")
        assert (done.returncode, done.stdout) == (1, "")
        assert "model='no/such/model/anywhere': no file or folder" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("1_000", 1000), ("2k", 2048), ("3M", 3 << 20), ("2GiB", 2 << 30), ("1gb", 1 << 30)],
)
def test_sizes_may_carry_a_unit(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from nanovllm.cli import plan
    from nanovllm.cli.options import engine_options

    seen = []
    monkeypatch.setattr(plan, "run", lambda args: seen.append(engine_options(args)) or 0)
    assert main(["plan", "--kv-cache-memory-bytes", text, "--no-enable-prefix-caching"]) == 0
    assert seen == [{"kv_cache_memory_bytes": size, "enable_prefix_caching": False}]


def test_earlier_spellings_of_options(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from nanovllm.cli import plan
    from nanovllm.cli.options import engine_options

    seen = []
    monkeypatch.setattr(plan, "run", lambda args: seen.append(engine_options(args)) or 0)
    assert main(["plan", "--kvcache-block-size", "64", "--num-kvcache-blocks=9", "--num-kv-cache-blocks", "9"]) == 0
    assert seen == [{"kv_cache_block_size": 64, "num_kv_cache_blocks": 9}]
    assert main(["plan", "--kvcache-block-size", "64", "--kv-cache-block-size", "32"]) == 2
    assert "kvcache_block_size=64 and kv_cache_block_size=32: two spellings" in capsys.readouterr().err
    assert main(["plan", "--help"]) == 0
    assert "kvcache" not in capsys.readouterr().out
