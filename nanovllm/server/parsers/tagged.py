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
from collections.abc import Callable
from dataclasses import dataclass

from nanovllm.server.parsers.argument_types import as_json
from nanovllm.server.parsers.call_format import CallScanner, NamedCall, Tools
from nanovllm.server.parsers.json_object import Status
from nanovllm.server.parsers.text import is_partial_tag, skip_blanks

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
        self._values: dict[str, str] = {}
        self._is_complete = False

    @property
    def calls(self) -> list[NamedCall]:
        """The call, once it is complete: until then a value may turn out to be malformed."""
        if self._name is None or not self._is_complete:
            return []
        parameters = (self._tools or {}).get(self._name, {})
        members = (
            f"{json.dumps(key, ensure_ascii=False)}: {as_json(text, key, parameters)}"
            for key, text in self._values.items()
        )
        return [(self._name, f"{{{', '.join(members)}}}")]

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
            return
        if is_partial_tag(text, start, tags.end):
            raise _UnfinishedError
        start = _after(text, start, tags.before_key)
        end = text.find(tags.after_key, start)
        if end < 0:
            raise _UnfinishedError
        after_key = end + len(tags.after_key)
        self.end = self._searched = _after(text, after_key, tags.before_value) if tags.before_value else after_key
        self._key = text[start:end].strip()

    def _read_value(self, text: str, key: str) -> None:
        """A value ends with the first closing tag that another parameter or the end of the call follows."""
        tags = self._tags
        end = text.find(tags.after_value, self._searched)
        while end >= 0:
            self._searched, after = end, skip_blanks(text, end + len(tags.after_value))
            if text.startswith((tags.before_key, tags.end), after):
                value = text[self.end : end]
                self._values[key] = value.removeprefix("\n").removesuffix("\n") if tags.breaks_lines else value
                self.end, self._key = after, None
                return
            if is_partial_tag(text, after, tags.before_key) or is_partial_tag(text, after, tags.end):
                raise _UnfinishedError
            end = text.find(tags.after_value, end + 1)
        self._searched = max(self._searched, len(text) - len(tags.after_value) + 1)
        raise _UnfinishedError


def _after(text: str, start: int, tag: str) -> int:
    """The position after whitespace and the tag."""
    start = skip_blanks(text, start)
    if text.startswith(tag, start):
        return start + len(tag)
    raise _UnfinishedError if is_partial_tag(text, start, tag) else _MalformedError
