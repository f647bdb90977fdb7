"""Tokenizer folders, conversations and tools for the tests of the tokenizer and of its chat template."""

import json
import os
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SMALL = REPOSITORY / "tests" / "data" / "tokenizer"
QWEN3 = Path(os.environ.get("NANOVLLM_QWEN3_TOKENIZER") or REPOSITORY.parent / "shared/data/tokenizers/qwen3")

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather <now> & “here”",
            "parameters": {"type": "object", "properties": {"city": {"type": "string", "enum": ["Köln", "北京"]}}},
        },
    }
]

USER = {"role": "user", "content": "What is 2 + 2? <b>"}
SYSTEM = {"role": "system", "content": "Be brief. 请简短。"}
ASSISTANT = {"role": "assistant", "content": "<think>\nTwo and two.\n</think>\n\nIt is 4."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}}],
}
TOOL = {"role": "tool", "content": '{"sky": "grey"}'}
CHATS = {
    "one": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, {"role": "user", "content": "And 3 + 3?"}],
    "tools": [USER, CALL, TOOL, {"role": "user", "content": "Thanks.  "}],
    "ends with assistant": [USER, ASSISTANT],
}


def edit_json(file, **changes):
    content = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}), encoding="utf-8")
