"""The identity of blocks: a digest that every process computes alike, compared by content."""

import subprocess
import sys
from itertools import combinations

import pytest

from nanovllm.engine.consistency import check_prefixes
from nanovllm.engine.extras import encode_extras
from nanovllm.engine.prefix import NO_EXTRAS, PrefixNode, PrefixTable, blake2b_256

SCRIPT = """
from nanovllm.engine.extras import encode_extras
from nanovllm.engine.prefix import PrefixTable
table = PrefixTable(block_size=4)
_, first = table.key(table.root.digest, [1, 2, 3, 4], encode_extras(()))
_, second = table.key(first, [5, 6, 7, 2**40], encode_extras(("cache_salt", "tenant", b"adapter")))
print(first.hex(), second.hex())
"""
FIRST = "173df53b1e21ddea0be91e6dc16e0cad27949d705034e9bb42f0b5a58ee907c0"
SECOND = "b4e287f019470d04da920b4e582da383599d31bda9e6721b96134265622c70b2"


@pytest.mark.parametrize("seed", ["0", "1", "random"])
def test_another_process_computes_the_same_digests(seed: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [FIRST, SECOND]


def test_the_layout_is_the_documented_one() -> None:
    content = bytes(32)
    content += (4).to_bytes(4, "little")
    content += b"".join(token.to_bytes(8, "little") for token in (1, 2, 3, 4))
    content += (0).to_bytes(4, "little")
    assert blake2b_256(content).hex() == FIRST


def test_extras_that_differ_encode_differently() -> None:
    extras = [
        (),
        ("",),
        (b"",),
        ("", ""),
        ("a",),
        (b"a",),
        ("a", "b"),
        ("ab",),
        ("a", "b", ""),
        ("\ud800",),
        ("b", "a"),
    ]
    encoded = [encode_extras(each) for each in extras]
    assert all(left != right for left, right in combinations(encoded, 2))
    assert encode_extras(("é",)) == bytes.fromhex("01000000" + "01" + "02000000" + "c3a9")


def extend(table: PrefixTable, parent: PrefixNode, token: int, extras: bytes = NO_EXTRAS) -> PrefixNode:
    return table.extend(parent, table.key(parent.digest, [token], extras), extras)


def find(table: PrefixTable, parent: PrefixNode, token: int) -> PrefixNode | None:
    return table.find(parent, table.key(parent.digest, [token], NO_EXTRAS), NO_EXTRAS)


def test_there_is_one_node_for_each_content_even_if_all_digests_are_equal() -> None:
    table = PrefixTable(block_size=1, digest=lambda content: b"")
    first = extend(table, table.root, 1)
    others = [
        extend(table, table.root, 2),
        extend(table, table.root, 1, encode_extras(("a",))),
        extend(table, first, 1),
    ]
    assert len({first, *others}) == len(table) == 4
    assert extend(table, table.root, 1) is first is find(table, table.root, 1)
    assert find(table, others[0], 1) is None


def test_a_prefix_stays_as_long_as_something_uses_it() -> None:
    table = PrefixTable(block_size=1)
    parent = extend(table, table.root, 1)
    parent.num_uses += 1
    child = extend(table, parent, 2)
    child.num_uses += 1
    table.release(parent)
    assert find(table, table.root, 1) is parent, "its child needs it"
    check_prefixes(table, {child: 1})
    with pytest.raises(AssertionError):
        check_prefixes(table, {})
    table.release(child)
    assert len(table) == 0
    check_prefixes(table, {})


def test_a_long_chain_is_removed() -> None:
    table = PrefixTable(block_size=1)
    node = table.root
    for token in range(100_000):
        node = extend(table, node, token)
    node.num_uses += 1
    table.release(node)
    assert len(table) == 0
