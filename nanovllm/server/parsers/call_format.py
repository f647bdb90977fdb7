"""What a format of tool calls consists of: the tags around a call, and the scanner that reads it.

The most common form of a call is a JSON object, {"name": ..., "arguments": {...}}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nanovllm.server.parsers.events import new_call_id
from nanovllm.server.parsers.json_object import ObjectScanner, Status

Tools = Mapping[str, Mapping[str, Any]]  # name -> the JSON schema of the parameters
NamedCall = tuple[str, str]  # the tool's name, and the arguments as a JSON object

# The names of the arguments in the known formats. Models mix them up, so either is accepted.
ARGUMENT_KEYS = ("arguments", "parameters")


class CallScanner(Protocol):
    """Reads what follows the opener, from its first character on."""

    def scan(self, text: str) -> Status:
        """Scan the text, which has grown since the last time. COMPLETE only if there is a call of a known tool."""

    @property
    def end(self) -> int:
        """Where the call ends, once it is complete; if it is invalid, where it stops being a call."""

    @property
    def calls(self) -> list[NamedCall]:
        """The calls so far. The arguments of the last one may still grow; the call itself is certain."""


class JsonCall:
    """Scans a JSON object, the call, that begins at `start`. Without `tools`, any name is known."""

    def __init__(self, start: int, tools: Tools | None) -> None:
        self._object = ObjectScanner(start)
        self._tools = tools
        self.calls: list[NamedCall] = []

    @property
    def end(self) -> int:
        return self._object.end

    def scan(self, text: str) -> Status:
        status = self._object.scan(text)
        call = self._read(text, missing="{}" if status is Status.COMPLETE else "")
        self.calls = [call] if call else []
        return Status.INVALID if status is Status.COMPLETE and not call else status

    def _read(self, text: str, *, missing: str) -> NamedCall | None:
        """The call, once its name is known and its arguments have begun. `missing`: the arguments if there are none."""
        members = self._object.members_so_far
        name = text[members["name"]] if "name" in members else ""
        key = next((key for key in members if key in ARGUMENT_KEYS), None)
        arguments = missing if key is None else text[members[key]]
        if not name.startswith('"') or not arguments.startswith("{"):
            return None
        name = json.loads(name)
        return (name, arguments) if self._tools is None or name in self._tools else None


@dataclass(frozen=True)
class CallFormat:
    """The format in which a model generates a call."""

    opener: str = ""  # the tag before the call, anywhere in the text
    bare_start: str = ""  # with what a call begins if the model leaves the opener out, as some do
    closer: str = ""  # the tag after the call; it is missing if the length limit cut the completion
    separator: str = ""  # between two calls, instead of another opener
    begins_message: bool = False  # the call may also be the beginning of the message, without an opener
    scanner: Callable[[int, Tools | None], CallScanner] = JsonCall  # where the call begins, and the known tools
    arguments_key: str = "arguments"  # in the JSON object of a forced call
    new_id: Callable[[], str] = new_call_id


# A call that is forced by a grammar: the object and nothing else.
FORCED_CALL = CallFormat(begins_message=True)
