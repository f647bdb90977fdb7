"""Tags in text that still grows."""


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of the text may yet become the tag."""
    if tag[:1] not in text:
        return 0
    longest = min(len(text), len(tag) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(tag[:count])), 0)
