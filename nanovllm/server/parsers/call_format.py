"""What a format of tool calls consists of: the tags around a call, and the scanner that reads it.

The most common form of a call is a JSON object, {"name": ..., "arguments": {...}}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
    """Scans a JSON object, the call, that begins at `start`. Without `tools`, any name is known.

    `keys`: the names that the object must begin with. Without them it may have others, and no arguments.
    """

    def __init__(self, start: int, tools: Tools | None, *, keys: Sequence[str] = ()) -> None:
        self._object = ObjectScanner(start)
        self._tools, self._keys = tools, keys
        self.calls: list[NamedCall] = []

    @property
    def end(self) -> int:
        return self._object.end

    def scan(self, text: str) -> Status:
        status = self._object.scan(text)
        members = self._object.members_so_far
        name = text[members["name"]] if "name" in members else None
        if not self._has_keys() or (name is not None and not self._is_known(name)):
            return Status.INVALID
        key = next((key for key in members if key in ARGUMENT_KEYS), None)
        missing = "{}" if status is Status.COMPLETE and not self._keys else ""
        arguments = missing if key is None else text[members[key]]
        if name is not None and arguments.startswith("{"):
            self.calls = [(json.loads(name), arguments)]
        return Status.INVALID if status is Status.COMPLETE and not self.calls else status

    def _has_keys(self) -> bool:
        return all(found == key for found, key in zip(self._object.keys, self._keys, strict=False))

    def _is_known(self, name: str) -> bool:
        return name.startswith('"') and (self._tools is None or json.loads(name) in self._tools)


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

    @property
    def is_json(self) -> bool:
        """Whether a call is the JSON object that forced calls are."""
        return self.scanner is JsonCall


# A call that is forced by a grammar: the object and nothing else.
FORCED_CALL = CallFormat(begins_message=True)
# The message follows `call_or_content_schema`. An object that is no call is content from the first name that differs.
CALL_OR_CONTENT = CallFormat(begins_message=True, scanner=partial(JsonCall, keys=("name", "arguments")))
