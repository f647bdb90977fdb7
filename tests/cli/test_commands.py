"""generate, chat and plan as processes; their output is compared with the Python API."""

import json
import os
import pty
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import pytest

from nanovllm import LLM, SamplingParams

Cli = Callable[..., subprocess.CompletedProcess[str]]
Start = Callable[..., subprocess.Popen[bytes]]

SMALL_CACHE = ["--kv-cache-memory-bytes", "64M"]
ENDLESS = [*SMALL_CACHE, "--ignore-eos", "--max-tokens", "8000", "--max-model-len", "8192"]


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, kv_cache_memory_bytes=64 << 20) as opened:
        yield opened


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


# --- generate ---------------------------------------------------------------------------------------------------------


def test_default_model_answers_a_question(cli: Cli, default_model_path: Path) -> None:
    done = cli("generate", "What is the capital of Germany?", *SMALL_CACHE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "The capital of Germany is Berlin.\n", "")


def test_generate_asks_through_the_chat_template(cli: Cli, tiny_model: Path, llm: LLM) -> None:
    done = cli("generate", "-", "--model", tiny_model, "--max-tokens", "12", *SMALL_CACHE, stdin="How many?\n")
    expected = llm.chat([user("How many?")], SamplingParams(temperature=0, max_tokens=12), use_tqdm=False)[0]
    assert (done.returncode, done.stdout) == (0, expected["text"] + "\n")
    assert expected.outputs[0].finish_reason == "length"
    assert done.stderr == "[cut off after 12 tokens; --max-tokens and --max-model-len set the limit]\n"


def test_generate_raw_with_sampling_options(cli: Cli, tiny_model: Path, llm: LLM) -> None:
    options = ["--temperature", "0.9", "--top-k", "50", "--seed", "7", "--ignore-eos", "--max-tokens", "16"]
    done = cli("generate", "--raw", "Natalia sold", "--model", tiny_model, *options, *SMALL_CACHE)
    params = SamplingParams(temperature=0.9, top_k=50, seed=7, ignore_eos=True, max_tokens=16)
    assert (done.returncode, done.stdout) == (0, llm.generate("Natalia sold", params, use_tqdm=False)[0]["text"] + "\n")


def test_without_a_chat_template_text_is_continued(cli: Cli, tiny_model: Path, tmp_path: Path, llm: LLM) -> None:
    for file in tiny_model.iterdir():
        (tmp_path / file.name).symlink_to(file)
    settings = json.loads((tiny_model / "tokenizer_config.json").read_text())
    del settings["chat_template"]
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    options = ["--model", str(tmp_path), "--max-tokens", "8", *SMALL_CACHE]
    done = cli("generate", "Natalia sold", *options)
    params = SamplingParams(temperature=0, max_tokens=8)
    assert (done.returncode, done.stdout) == (0, llm.generate("Natalia sold", params, use_tqdm=False)[0]["text"] + "\n")
    assert "no chat template" in done.stderr and "continuing the text as it is" in done.stderr
    chat = cli("chat", *options, stdin="Hello\n")
    assert (chat.returncode, chat.stdout) == (1, "")
    assert "no chat template" in chat.stderr and "Traceback" not in chat.stderr


def test_refused_prompt_is_an_error_without_output(cli: Cli, tiny_model: Path) -> None:
    done = cli("generate", "word " * 100, "--model", tiny_model, "--max-model-len", "64", *SMALL_CACHE)
    assert (done.returncode, done.stdout) == (1, "")
    assert "max_model_len=64" in done.stderr and "Traceback" not in done.stderr


def test_interrupt_leaves_with_130_and_no_traceback(start: Start, tiny_model: Path) -> None:
    process = start("generate", "Hello", "--model", tiny_model, *ENDLESS)
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


def test_closed_pipe_is_quiet(start: Start, tiny_model: Path) -> None:
    process = start("generate", "Hello", "--model", tiny_model, *ENDLESS)
    assert process.stdout is not None and process.stderr is not None and process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""


def test_closed_pipe_is_quiet_when_only_the_help_is_left(start: Start) -> None:
    process = start("generate", "--help")
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 141
    assert process.stderr.read() == b""


# --- chat -------------------------------------------------------------------------------------------------------------


def test_chat_keeps_the_conversation_until_reset(cli: Cli, tiny_model: Path, llm: LLM) -> None:
    lines = ["Janet has ducks.", "", "How many?", "/hello", "/reset", "How many?", "/exit", "Never asked."]
    options = ["--model", str(tiny_model), "--system", "Count.", "--max-tokens", "10", *SMALL_CACHE]
    done = cli("chat", *options, stdin="\n".join(lines))
    params = SamplingParams(temperature=0, max_tokens=10)

    def ask(*messages: dict[str, str]) -> str:
        conversation = [{"role": "system", "content": "Count."}, *messages]
        return llm.chat(conversation, params, use_tqdm=False)[0]["text"]

    first = ask(user("Janet has ducks."))
    second = ask(user("Janet has ducks."), assistant(first), user("How many?"))
    third = ask(user("How many?"))
    assert second != third
    assert done.returncode == 0
    assert done.stdout == f"{first}\n{second}\n{third}\n"
    assert "[unknown command /hello; the commands are /reset and /exit]\n" in done.stderr
    assert "[new conversation]\n" in done.stderr


def test_chat_forgets_its_oldest_turns(cli: Cli, tiny_model: Path, llm: LLM) -> None:
    questions = [f"Question {number}: how many clips did Natalia sell?" for number in range(4)]
    options = ["--max-model-len", "160", "--max-tokens", "8", "--ignore-eos", *SMALL_CACHE]
    done = cli("chat", "--model", tiny_model, *options, stdin="\n".join([*questions, "too long " * 100, "Bye."]))
    assert done.returncode == 0
    assert "[the conversation exceeded max_model_len=160 tokens: its oldest turn was dropped]" in done.stderr
    assert done.stderr.count("[cut off after 8 tokens") == 5
    assert "[refused: the prompt has" in done.stderr
    fresh = llm.chat([user(questions[0])], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert done.stdout.startswith(fresh[0]["text"])


def read_until(stream: IO[bytes], end: bytes) -> bytes:
    text = b""
    while not text.endswith(end):
        char = stream.read(1)
        assert char, f"the stream ended with {text!r} before {end!r}"
        text += char
    return text


def test_interrupt_stops_an_answer_and_leaves_at_the_prompt(start: Start, tiny_model: Path) -> None:
    terminal, stdin = pty.openpty()
    try:
        process = start("chat", "--model", tiny_model, *ENDLESS, stdin=stdin)
        assert process.stdout is not None and process.stderr is not None
        assert b"Ctrl-C stops an answer" in read_until(process.stderr, b"\n> ")
        os.write(terminal, b"How many?\n")
        assert process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        assert read_until(process.stderr, b"> ") == b"[stopped]\n> "
        os.write(terminal, b"/reset\n")
        assert read_until(process.stderr, b"> ") == b"[new conversation]\n> "
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, b"")
    finally:
        os.close(terminal)
        os.close(stdin)


def test_interrupt_leaves_when_messages_come_from_a_pipe(start: Start, tiny_model: Path) -> None:
    process = start("chat", "--model", tiny_model, *ENDLESS, stdin=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(b"How many?\nHow many?\n")
    process.stdin.flush()
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, b"")


def test_end_of_file_at_the_prompt_leaves(start: Start, tiny_model: Path) -> None:
    terminal, stdin = pty.openpty()
    try:
        process = start("chat", "--model", tiny_model, *SMALL_CACHE, stdin=stdin)
        assert process.stderr is not None
        read_until(process.stderr, b"\n> ")
        os.write(terminal, b"\x04")
        out, _ = process.communicate(timeout=60)
        assert (process.returncode, out) == (0, b"")
    finally:
        os.close(terminal)
        os.close(stdin)


# --- plan -------------------------------------------------------------------------------------------------------------


def test_plan_prints_what_the_api_says(cli: Cli, tiny_model: Path) -> None:
    done = cli("plan", tiny_model, "--kv-cache-memory-bytes", "1M", "--max-model-len", "256")
    expected = LLM.plan(tiny_model, kv_cache_memory_bytes=1 << 20, max_model_len=256)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{expected}\n", "")


def test_plan_as_json(cli: Cli, tiny_model: Path) -> None:
    done = cli("plan", "--model", tiny_model, "--num-kv-cache-blocks", "8", "--kv-cache-block-size", "32", "--json")
    found = json.loads(done.stdout)
    assert done.returncode == 0
    assert (found["num_blocks"], found["block_size"], found["num_tokens"]) == (8, 32, 256)
    # 2 (key, value) x 2 layers x 2 heads x 16 numbers of 4 bytes
    assert found["kv_bytes_per_token"] == 2 * 2 * 2 * 16 * 4
