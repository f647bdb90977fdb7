"""One `nanovllm serve` process for all clients. Its weights are random: only schemas and forced calls shape answers."""

from collections.abc import Iterator

import pytest

from tests.server.process import ServerProcess, server_process

MODEL = "tiny"


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with server_process(tmp_path_factory.mktemp("model"), served_model_name=MODEL) as server:
        yield server


@pytest.fixture(scope="package")
def url(server: ServerProcess) -> str:
    """The base URL of the OpenAI APIs. Anthropic's client adds /v1 itself."""
    return f"{server.url}/v1"
