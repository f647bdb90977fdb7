"""Setup for all tests: no network, a limited number of threads, the default model, a check of skipped tests."""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

# Set before anything imports torch or huggingface_hub, which read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("PYTEST_XDIST_WORKER_COUNT", "1")
os.environ.setdefault(
    "OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))
)

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined: without a GPU, kernels run in the interpreter

# A shell starts background jobs with SIGINT ignored. Child processes inherit that, and some tests interrupt theirs.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

hypothesis.settings.register_profile("project", deadline=None)  # how long an example takes is the machine's business
hypothesis.settings.register_profile("few", deadline=None, max_examples=5)  # for tests that run under a sanitizer
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "project"))

EXPECTED_SKIPS = tuple(
    f"needs {what}" for what in ("a GPU", "Triton's interpreter", "the Qwen3 tokenizer", "litellm", "instructor")
)


class SkipGuard:
    """With NANOVLLM_FAIL_ON_SKIP=1, fails the session if a test was skipped for a reason not in EXPECTED_SKIPS."""

    def __init__(self) -> None:
        self.unexpected: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not hasattr(report, "wasxfail"):
            self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped:
            _, _, reason = report.longrepr
            reason = reason.removeprefix("Skipped: ")
            if not reason.startswith(EXPECTED_SKIPS):
                self.unexpected.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.unexpected and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unexpected:
            terminalreporter.section("skips nobody expected: the session fails", red=True)
            for line in self.unexpected:
                terminalreporter.line(line)


def pytest_configure(config: pytest.Config) -> None:
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None and not constants.HF_HUB_OFFLINE:
        raise pytest.UsageError("huggingface_hub was imported before conftest.py could turn its network use off")
    if os.environ.get("NANOVLLM_FAIL_ON_SKIP") == "1":
        config.pluginmanager.register(SkipGuard())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several test processes, the tests of one file run in one of them; so do those that start a Ray cluster."""
    for item in items if os.environ["PYTEST_XDIST_WORKER_COUNT"] != "1" else []:
        name = "ray" if "ray" in item.path.stem.split("_") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def logging_of_its_own() -> Iterator[None]:
    """A command that a test runs in this process makes the package log to that test's stderr; this ends with it."""
    logger = logging.getLogger("nanovllm")
    handlers, level, propagates = list(logger.handlers), logger.level, logger.propagate
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)
    logger.propagate = propagates


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, which `make test` downloads into the cache."""
    from nanovllm.errors import ModelNotFoundError
    from nanovllm.utils import default_model

    try:
        return default_model.default_model_path()
    except ModelNotFoundError as error:
        pytest.skip(f"needs the default model: {error}")
