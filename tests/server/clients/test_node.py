"""Clients for Node: OpenAI's, and the AI SDK with its providers."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.clients.conftest import MODEL
from tests.server.clients.weather import QUESTION, Weather

NODE = Path(__file__).parents[1] / "node"
CLIENTS = (
    *("openai-chat", "openai-responses"),
    *("ai-sdk-compatible", "ai-sdk-openai-chat", "ai-sdk-openai-responses", "ai-sdk-anthropic"),
)


@pytest.mark.parametrize("client", CLIENTS)
def test_text_stream_tools_and_schema(url: str, client: str) -> None:
    if shutil.which("node") is None or not (NODE / "node_modules" / "ai").exists():
        pytest.skip("needs Node with the packages of tests/server/node: run `npm ci` there")
    command = ["node", str(NODE / "matrix.mjs"), url, client, MODEL, QUESTION]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["text"] and "".join(result["pieces"]) == result["text"] and len(result["pieces"]) > 1
    assert result["called"] in (["Paris"], ["Rome"])
    assert len(result["answers"]) >= 2 and all(map(Weather.model_validate, result["answers"]))
