"""The identity of a full block: a digest of its tokens and of everything before them, the same in every process.

    digest = blake2b-256(parent digest | number of tokens | tokens | extras)

  parent digest     32 bytes: the digest of the block before; zeros for the first block
  number of tokens  4 bytes, little-endian
  tokens            8 bytes each, little-endian, signed
  extras            what else the content of the block depends on, as `encode_extras` writes it

The digest finds a block; the comparison of parent, tokens and extras decides. So the prefix cache is exact even if two
different blocks had the same digest.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from hashlib import blake2b
from struct import Struct, pack

DIGEST_SIZE = 32
ROOT_DIGEST = bytes(DIGEST_SIZE)
BYTES_KIND, STR_KIND = 0, 1

Digest = Callable[[bytes], bytes]


def encode_extras(extras: Seq[str | bytes]) -> bytes:
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


NO_EXTRAS = encode_extras(())


def blake2b_256(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_SIZE).digest()


class PrefixNode:
    """A full block's content: its own tokens, and through its parent all tokens before them."""

    __slots__ = ("digest", "extras", "num_uses", "parent", "tokens")

    def __init__(self, parent: "PrefixNode | None", tokens: bytes, extras: bytes, digest: bytes) -> None:
        self.parent = parent  # None = this is the root, the empty prefix
        self.tokens = tokens  # count and token ids, as the digest reads them
        self.extras = extras
        self.digest = digest
        self.num_uses = 0  # blocks, children and sequences that refer to the node


class PrefixTable:
    """All known prefixes. There is one node for each content, so that nodes are compared by identity.

    A node stays as long as something uses it: a block that holds its tokens, a child, or a sequence that extends it.
    """

    def __init__(self, *, block_size: int, digest: Digest = blake2b_256) -> None:
        self.root = PrefixNode(None, b"", NO_EXTRAS, ROOT_DIGEST)
        self.root.num_uses = 1  # it is never removed
        self._block_size = block_size
        self._digest = digest
        self._pack = Struct(f"<I{block_size}q").pack
        self._nodes: dict[bytes, tuple[PrefixNode, ...]] = {}  # by digest; more than one only if digests collide

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))

    def find(self, parent: PrefixNode, token_ids: list[int], extras: bytes) -> PrefixNode | None:
        """The node of a block's tokens after `parent`, if it is known."""
        tokens = self._pack(self._block_size, *token_ids)
        digest = self._digest(parent.digest + tokens + extras)
        for node in self._nodes.get(digest, ()):
            if node.parent is parent and node.tokens == tokens and node.extras == extras:
                return node
        return None

    def extend(self, parent: PrefixNode, token_ids: list[int], extras: bytes) -> PrefixNode:
        """The node of a block's tokens after `parent`, made if it is not known. The caller adds its use at once."""
        tokens = self._pack(self._block_size, *token_ids)
        digest = self._digest(parent.digest + tokens + extras)
        known = self._nodes.get(digest, ())
        for node in known:
            if node.parent is parent and node.tokens == tokens and node.extras == extras:
                return node
        node = PrefixNode(parent, tokens, extras, digest)
        parent.num_uses += 1
        self._nodes[digest] = (*known, node)
        return node

    def release(self, node: PrefixNode) -> None:
        """One use less. A node without any is removed, and with it its use of the parent."""
        node.num_uses -= 1
        while not node.num_uses:
            self._remove(node)
            assert node.parent is not None, "the root is in use for ever"
            node = node.parent
            node.num_uses -= 1

    def _remove(self, node: PrefixNode) -> None:
        others = tuple(other for other in self._nodes[node.digest] if other is not node)
        if others:
            self._nodes[node.digest] = others
        else:
            del self._nodes[node.digest]

    def check(self, uses: dict[PrefixNode, int]) -> None:
        """Raise AssertionError unless the nodes are those in use. `uses`: by blocks and sequences, of each node."""
        known = [node for nodes in self._nodes.values() for node in nodes]
        counted = dict.fromkeys(known, 0)
        for node in known:
            assert node.parent is self.root or node.parent in counted, "a prefix lacks its parent"
            if node.parent is not self.root:
                counted[node.parent] += 1
        for node, count in uses.items():
            if node is not self.root:
                assert node in counted, "a prefix in use is not known"
                counted[node] += count
        assert all(node.num_uses == count > 0 for node, count in counted.items()), "uses of prefixes are counted wrong"
