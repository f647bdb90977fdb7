"""Find tags in a growing text."""

import re

_BLANKS = re.compile(r"[ \t\n\r]*")  # the whitespace of JSON


def partial_tag_length(text: str, tag: str) -> int:
    """How many characters at the end of the text are the beginning of the tag, and must be held back."""
    if tag[:1] not in text:
        return 0
    longest = min(len(text), len(tag) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(tag[:count])), 0)


def is_partial_tag(text: str, start: int, tag: str) -> bool:
    """Whether the text from `start` on is the beginning of the tag, but not all of it."""
    return len(text) - start < len(tag) and tag.startswith(text[start:])


def skip_blanks(text: str, start: int) -> int:
    """The position of the first character from `start` on that is not whitespace, or the end of the text."""
    blanks = _BLANKS.match(text, start)
    return start if blanks is None else blanks.end()
