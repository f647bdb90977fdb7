"""Read calls whose arguments are plain text between tags, the formats of Qwen3-Coder and Qwen3.5, and of GLM.

<function=NAME>                             NAME
<parameter=KEY>                             <arg_key>KEY</arg_key>
VALUE                                       <arg_value>VALUE</arg_value>
</parameter>                                </tool_call>
</function>
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nanovllm.server.parsers.argument_types import as_json, is_string
from nanovllm.server.parsers.call_format import CallScanner, NamedCall, Tools
from nanovllm.server.parsers.json_object import Status
from nanovllm.server.parsers.text import is_partial_tag, partial_tag_length, skip_blanks

_NAME = re.compile(r"[a-zA-Z0-9_-]+")


@dataclass(frozen=True)
class Tags:
    """The tags in the order in which they appear; those of a parameter may appear several times. "" is no tag."""

    before_name: str
    after_name: str
    before_key: str
    after_key: str
    before_value: str
    after_value: str
    end: str
    breaks_lines: bool  # a value stands on its own lines: the newlines next to the tags are not part of it


QWEN_TAGS = Tags("<function=", ">", "<parameter=", ">", "", "</parameter>", "</function>", breaks_lines=True)
GLM_TAGS = Tags("", "", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "</tool_call>", breaks_lines=False)


class _UnfinishedError(Exception):
    """More text is needed."""


class _MalformedError(Exception):
    """The text is not a call."""


def tagged_call(tags: Tags) -> Callable[[int, Tools | None], CallScanner]:
    """The scanner of the format that has these tags."""
    return lambda start, tools: TaggedCall(tags, start, tools)


class TaggedCall:
    """Scans a call that begins at `start`. What has been read is not read again when the text has grown."""

    def __init__(self, tags: Tags, start: int, tools: Tools | None) -> None:
        self._tags = tags
        self._tools = tools
        self.end = start  # of what has been read: the name, and whole parameters
        self._name: str | None = None
        self._key: str | None = None  # of the parameter whose value begins at `end`
        self._searched = start  # the value does not end before
        self._num_read = 0  # characters of the value that are in the arguments already
        self._arguments = ""  # as JSON; without the value that is being read, unless it is a string
        self._is_complete = False

    @property
    def calls(self) -> list[NamedCall]:
        return [(self._name, self._arguments)] if self._name is not None and self._arguments else []

    def scan(self, text: str) -> Status:
        try:
            while not self._is_complete:
                if self._name is None:
                    self._read_name(text)
                elif self._key is None:
                    self._read_key_or_end(text)
                else:
                    self._read_value(text, self._key)
        except _UnfinishedError:
            return Status.GROWING
        except _MalformedError:
            return Status.INVALID
        return Status.COMPLETE

    def _read_name(self, text: str) -> None:
        found = _NAME.match(text, start := _after(text, self.end, self._tags.before_name))
        if start == len(text) or (found is not None and found.end() == len(text)):
            raise _UnfinishedError
        if found is None or (self._tools is not None and found[0] not in self._tools):
            raise _MalformedError
        self.end, self._name = _after(text, found.end(), self._tags.after_name), found[0]

    def _read_key_or_end(self, text: str) -> None:
        tags, start = self._tags, skip_blanks(text, self.end)
        if text.startswith(tags.end, start):
            self.end, self._is_complete = start + len(tags.end), True
            self._arguments = f"{self._arguments or '{'}}}"
            return
        if is_partial_tag(text, start, tags.end):
            raise _UnfinishedError
        start = _after(text, start, tags.before_key)
        end = text.find(tags.after_key, start)
        if end < 0:
            raise _UnfinishedError
        after_key = end + len(tags.after_key)
        self.end = self._searched = _after(text, after_key, tags.before_value) if tags.before_value else after_key
        self._key, self._num_read = text[start:end].strip(), 0
        before = f"{self._arguments}, " if self._arguments else "{"
        self._arguments = f"{before}{json.dumps(self._key, ensure_ascii=False)}: "
        if is_string(self._key, self._parameters):
            self._arguments += '"'

    def _read_value(self, text: str, key: str) -> None:
        """A value ends with the first closing tag that another parameter or the end of the call follows."""
        tags = self._tags
        end = text.find(tags.after_value, self._searched)
        while end >= 0:
            self._searched, after = end, skip_blanks(text, end + len(tags.after_value))
            if text.startswith((tags.before_key, tags.end), after):
                self._add_value(key, text[self.end : end], is_complete=True)
                self.end, self._key = after, None
                return
            if is_partial_tag(text, after, tags.before_key) or is_partial_tag(text, after, tags.end):
                self._add_value(key, text[self.end : end], is_complete=False)
                raise _UnfinishedError
            end = text.find(tags.after_value, end + 1)
        self._searched = max(self._searched, len(text) - len(tags.after_value) + 1)
        held = partial_tag_length(text[self._searched :], tags.after_value)
        self._add_value(key, text[self.end : len(text) - held], is_complete=False)
        raise _UnfinishedError

    def _add_value(self, key: str, value: str, *, is_complete: bool) -> None:
        """Add the value, or its beginning, to the arguments. Only strings can be added before they are complete."""
        if self._tags.breaks_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        if is_string(key, self._parameters):
            self._arguments += json.dumps(value[self._num_read :], ensure_ascii=False)[1:-1] + '"' * is_complete
            self._num_read = max(self._num_read, len(value))
        elif is_complete:
            self._arguments += as_json(value, key, self._parameters)

    @property
    def _parameters(self) -> Mapping[str, Any]:
        """The schema of the arguments."""
        return (self._tools or {}).get(self._name or "", {})


def _after(text: str, start: int, tag: str) -> int:
    """The position after whitespace and the tag."""
    start = skip_blanks(text, start)
    if text.startswith(tag, start):
        return start + len(tag)
    raise _UnfinishedError if is_partial_tag(text, start, tag) else _MalformedError
