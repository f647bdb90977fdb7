"""Find the beginning of a tag at the end of a growing text."""


def partial_tag_length(text: str, tag: str) -> int:
    """How many characters at the end of the text are the beginning of the tag, and must be held back."""
    if tag[:1] not in text:
        return 0
    longest = min(len(text), len(tag) - 1)
    return next((count for count in range(longest, 0, -1) if text.endswith(tag[:count])), 0)
