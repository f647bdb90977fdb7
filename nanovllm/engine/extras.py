"""What the content of a block depends on beside its tokens, such as the user's salt, as block digests read it."""

from collections.abc import Sequence
from struct import pack

BYTES_KIND, STR_KIND = 0, 1


def encode_extras(extras: Sequence[str | bytes]) -> bytes:
    """The number of extras, then of each its kind (0 = bytes, 1 = UTF-8 text), its length in bytes, and the bytes.

    Numbers are 4 bytes, little-endian; a kind is 1 byte. Two different sequences of extras never encode alike.
    """
    parts = [pack("<I", len(extras))]
    for extra in extras:
        kind, content = BYTES_KIND, extra
        if isinstance(content, str):
            kind, content = STR_KIND, content.encode("utf-8", "surrogatepass")
        parts += (pack("<BI", kind, len(content)), content)
    return b"".join(parts)
