"""The identity of a full block: a digest of its tokens and of everything before them, the same in every process.

    digest = blake2b-256(parent digest | number of tokens | tokens | extras)

  parent digest     32 bytes: the digest of the block before; zeros for the first block
  number of tokens  4 bytes, little-endian
  tokens            8 bytes each, little-endian, signed
  extras            what else the content of the block depends on, as `extras.py` writes it

Blocks are compared by digest, parent, tokens and extras. So the prefix cache is exact even if two different blocks had
the same digest.
"""

from collections.abc import Callable
from hashlib import blake2b
from struct import Struct

DIGEST_SIZE = 32
ROOT_DIGEST = bytes(DIGEST_SIZE)
NO_EXTRAS = bytes(4)  # their number

Digest = Callable[[bytes], bytes]
# digest, parent (None = this is the root, the empty prefix), tokens, extras
Content = tuple[bytes, "PrefixNode | None", bytes, bytes]
BlockKey = tuple[bytes, bytes]  # of a full block: the number of tokens and the tokens as the digest reads them; digest


def blake2b_256(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_SIZE).digest()


class PrefixNode:
    """A full block's content: its own tokens, and through its parent all tokens before them."""

    __slots__ = ("content", "digest", "num_uses", "parent")

    def __init__(self, content: Content) -> None:
        self.content = content
        self.digest, self.parent, _, _ = content
        self.num_uses = 0  # blocks, children and sequences that refer to the node


class PrefixTable:
    """All known prefixes. There is one node for each content, so that nodes are compared by identity.

    A node stays as long as something uses it: a block that holds its tokens, a child, or a sequence that extends it.
    """

    def __init__(self, *, block_size: int, digest: Digest = blake2b_256) -> None:
        self.root = PrefixNode((ROOT_DIGEST, None, b"", NO_EXTRAS))
        self.root.num_uses = 1  # it is never removed
        self._block_size = block_size
        self._digest = digest
        self._pack = Struct(f"<I{block_size}q").pack
        self._nodes: dict[Content, PrefixNode] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def key(self, parent_digest: bytes, token_ids: list[int], extras: bytes) -> BlockKey:
        """What identifies a full block after the one with `parent_digest`."""
        tokens = self._pack(self._block_size, *token_ids)
        return tokens, self._digest(parent_digest + tokens + extras)

    def find(self, parent: PrefixNode, key: BlockKey, extras: bytes) -> PrefixNode | None:
        """The node of this block after `parent`, if it is known."""
        tokens, digest = key
        return self._nodes.get((digest, parent, tokens, extras))

    def extend(self, parent: PrefixNode, key: BlockKey, extras: bytes) -> PrefixNode:
        """The node of this block after `parent`, made if it is not known. The caller adds its use at once."""
        tokens, digest = key
        content = (digest, parent, tokens, extras)
        node = self._nodes.get(content)
        if node is None:
            node = self._nodes[content] = PrefixNode(content)
            parent.num_uses += 1
        return node

    def release(self, node: PrefixNode) -> None:
        """One use less. A node without any is removed, and with it its use of the parent."""
        node.num_uses -= 1
        while not node.num_uses:
            del self._nodes[node.content]
            assert node.parent is not None, "the root is in use for ever"
            node = node.parent
            node.num_uses -= 1
