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
BlockKey = tuple[bytes, bytes]  # of a full block: the number of tokens and the tokens as the digest reads them; digest


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

    __slots__ = ("digest", "extras", "num_uses", "parent", "same_digest", "tokens")

    def __init__(self, parent: "PrefixNode | None", tokens: bytes, extras: bytes, digest: bytes) -> None:
        self.parent = parent  # None = this is the root, the empty prefix
        self.tokens = tokens
        self.extras = extras
        self.digest = digest
        self.num_uses = 0  # blocks, children and sequences that refer to the node
        self.same_digest: PrefixNode | None = None  # another node, if digests collide


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
        self._nodes: dict[bytes, PrefixNode] = {}  # by digest

    def __len__(self) -> int:
        return len(self.all_nodes())

    def all_nodes(self) -> list[PrefixNode]:
        nodes = list(self._nodes.values())
        for node in nodes:  # those found on the way are visited too
            if node.same_digest is not None:
                nodes.append(node.same_digest)
        return nodes

    def key(self, parent_digest: bytes, token_ids: list[int], extras: bytes) -> BlockKey:
        """What identifies a full block after the one with `parent_digest`."""
        tokens = self._pack(self._block_size, *token_ids)
        return tokens, self._digest(parent_digest + tokens + extras)

    def find(self, parent: PrefixNode, key: BlockKey, extras: bytes) -> PrefixNode | None:
        """The node of this block after `parent`, if it is known."""
        tokens, digest = key
        node = self._nodes.get(digest)
        while node is not None:
            if node.parent is parent and node.tokens == tokens and node.extras == extras:
                return node
            node = node.same_digest
        return None

    def extend(self, parent: PrefixNode, key: BlockKey, extras: bytes) -> PrefixNode:
        """The node of this block after `parent`, made if it is not known. The caller adds its use at once."""
        node = self.find(parent, key, extras)
        if node is None:
            tokens, digest = key
            node = PrefixNode(parent, tokens, extras, digest)
            node.same_digest = self._nodes.get(digest)
            self._nodes[digest] = node
            parent.num_uses += 1
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
        first = self._nodes[node.digest]
        if first is not node:
            while first.same_digest is not node:
                assert first.same_digest is not None, "a node to remove is not known"
                first = first.same_digest
            first.same_digest = node.same_digest
        elif node.same_digest is not None:
            self._nodes[node.digest] = node.same_digest
        else:
            del self._nodes[node.digest]
