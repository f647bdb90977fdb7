"""A tiny random model with a real tokenizer, and the command line in its own process."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

TOKENIZER = Path(__file__).parent.parent / "data" / "tokenizer"
ROOT = Path(__file__).parent.parent.parent

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=600,  # that of the tokenizer
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)  # far from uniform, so that rounding does not decide the tokens
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / file, folder)
    return folder


@pytest.fixture(scope="session")
def environment() -> dict[str, str]:
    """This process's environment with normal buffering: what must be visible at once must be flushed."""
    usual = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**usual, "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def cli(environment: dict[str, str]) -> Cli:
    """Run `nanovllm` until it exits."""

    def run(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "nanovllm", *map(str, arguments)]
        return subprocess.run(
            command, input=stdin, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


@pytest.fixture
def start(environment: dict[str, str]) -> Any:
    """Start `nanovllm` and return while it runs; processes that still run at the end of the test are killed."""
    started: list[subprocess.Popen[bytes]] = []

    def run(*arguments: str | Path, stdin: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "nanovllm", *map(str, arguments)]
        process = subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()
