"""Damaged GGUF files: each is refused with an error that names the damage."""

import random
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from nanovllm.checkpoint.gguf import GGUFFile
from nanovllm.checkpoint.gguf_tokenizer import build_tokenizer, chat_template, special_tokens
from nanovllm.errors import CheckpointError
from tests.checkpoint.gguf_files import HEAD_DIM, finish, model_tensors, model_writer


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(name: str, dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_bytes(
    *parts: bytes, pairs: int = 0, tensors: int = 0, version: int = 3, magic: bytes = b"GGUF", data: int = 256
) -> bytes:
    head = struct.pack("<4sIQQ", magic, version, tensors, pairs) + b"".join(parts)
    return head + bytes(-len(head) % 32) + bytes(data)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQI", 4, 1, 7)


U8, U32, STRING, ARRAY = 0, 4, 8, 9
TWO_WORDS = pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("one") + text("two"))
DAMAGED = {
    "empty": (b"", "0 bytes are too few"),
    "magic": (file_bytes(magic=b"GGML"), "begins with b'GGML'"),
    "version1": (file_bytes(version=1), "GGUF version 0x1; supported are versions 2 and 3"),
    "big_endian": (file_bytes(version=3 << 24), "GGUF version 0x3000000.*little-endian"),
    "pairs": (file_bytes(pairs=2**63), f"states {2**63} metadata pairs.*only 264 bytes follow"),
    "tensors": (file_bytes(tensors=9), "states 9 tensors of at least 32 bytes, but only 264 bytes follow"),
    "key_length": (file_bytes(struct.pack("<Q", 2**40), pairs=1), f"key of metadata pair 0 has a length of {2**40}"),
    "cut_key": (file_bytes(struct.pack("<Q", 5000), pairs=1), "ends inside the key of metadata pair 0: 5000 bytes"),
    "utf8": (file_bytes(pair("k", STRING, text(b"\xff\xfe")), pairs=1), "metadata 'k' is not UTF-8"),
    "utf8_item": (
        file_bytes(pair("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff")), pairs=1),
        "metadata 'k' is not UTF-8",
    ),
    "kind": (file_bytes(pair("k", 13, b""), pairs=1), "metadata 'k' has the unknown value type 13"),
    "same_key": (file_bytes(pair("k", U8, b"1"), pair("k", U8, b"2"), pairs=2), "metadata key 'k' occurs twice"),
    "array_count": (
        file_bytes(pair("k", ARRAY, struct.pack("<IQ", U8, 2**40)), pairs=1),
        f"metadata 'k' has {2**40} array items",
    ),
    "array_past_end": (
        file_bytes(pair("k", ARRAY, struct.pack("<IQ", U32, 2**20)), pairs=1),
        f"ends inside metadata 'k': {2**22} bytes",
    ),
    "strings_past_end": (
        file_bytes(pair("k", ARRAY, struct.pack("<IQ", STRING, 2**20)), pairs=1),
        f"metadata 'k': item [0-9]+ of {2**20} runs past the end",
    ),
    "last_string_cut": (
        file_bytes(TWO_WORDS, pairs=1)[: 24 + len(TWO_WORDS) - 1],
        "metadata 'k': item 1 of 2 runs past the end",
    ),
    "array_kind": (file_bytes(pair("k", ARRAY, struct.pack("<IQ", 99, 1)), pairs=1), "unknown value type 99"),
    "nested": (file_bytes(pair("k", ARRAY, nested(5)), pairs=1), "nests arrays deeper than 4"),
    "alignment": (file_bytes(pair("general.alignment", U32, struct.pack("<I", 24)), pairs=1), "alignment is 24"),
    "alignment0": (file_bytes(pair("general.alignment", U32, struct.pack("<I", 0)), pairs=1), "alignment is 0"),
    "no_dims": (file_bytes(tensor_info("t", ()), tensors=1), "tensor 't' has 0 dimensions"),
    "many_dims": (file_bytes(tensor_info("t", (1,) * 5), tensors=1), "tensor 't' has 5 dimensions"),
    "zero_dim": (file_bytes(tensor_info("t", (8, 0)), tensors=1), r"tensor 't' has shape \(0, 8\)"),
    "type": (file_bytes(tensor_info("t", kind=4), tensors=1), "tensor 't' has the ggml type 4.*Q4_1"),
    "row": (file_bytes(tensor_info("t", (8,), kind=3), tensors=1), "rows of 8 elements; Q4_1 needs multiples of 32"),
    "misaligned": (
        file_bytes(tensor_info("t", offset=8), tensors=1),
        "offset 8, which is not a multiple",
    ),
    "out_of_range": (file_bytes(tensor_info("t", offset=256), tensors=1), "needs 32 bytes at 320, but the file ends"),
    "overflow": (file_bytes(tensor_info("t", (2**63, 2**63)), tensors=1), f"needs {2**128} bytes"),
    "same_tensor": (file_bytes(tensor_info("t"), tensor_info("t", offset=64), tensors=2), "tensor 't' occurs twice"),
    "overlap": (file_bytes(tensor_info("t", (32,)), tensor_info("u", offset=64), tensors=2), "'t' and 'u' overlap"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    content, message = DAMAGED[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as refusal:
        GGUFFile(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("version", [2, 3])
def test_the_same_bytes_undamaged_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "fine.gguf"
    parts = (pair("k", ARRAY, nested(4)), tensor_info("t", (8, 2), offset=64), tensor_info("u"))
    path.write_bytes(file_bytes(*parts, pairs=1, tensors=2, version=version))
    with GGUFFile(path) as file:
        assert file.metadata == {"k": [[[[7]]]]}
        assert file.tensors["t"].shape == (2, 8)


def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(CheckpointError, match="cannot be opened"):
            GGUFFile(path)


def use_all(path: Path) -> None:
    with GGUFFile(path) as file:
        file.hf_config()
        file.generation_config()
        for _, tensor in file.iter_tensors(torch.float32):
            assert tensor.numel() < 1 << 20
        special_tokens(file.metadata)
        chat_template(file.metadata)
        build_tokenizer(file.metadata).encode("abc zz 12 <s>")


def outcome(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    try:
        use_all(path)
    except CheckpointError:
        return "refused"
    return "read"


def quantized_model(path: Path) -> bytes:
    writer = model_writer(path, "llama")
    for name, tensor in model_tensors("llama", tied=True).items():
        kind = GGMLQuantizationType.Q4_1 if tensor.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.add_tensor("rope_freqs.weight", np.ones(HEAD_DIM // 2, np.float32))
    finish(writer)
    return path.read_bytes()


@pytest.mark.timeout(60)
def test_truncated_files_are_refused(tmp_path: Path) -> None:
    whole = quantized_model(tmp_path / "m.gguf")
    assert outcome(tmp_path / "m.gguf", whole) == "read"
    for length in range(0, len(whole) - 32, 97):  # the last tensor's padding may be missing
        assert outcome(tmp_path / "m.gguf", whole[:length]) == "refused", length


@pytest.mark.timeout(120)
def test_flipped_bytes_are_refused_or_read(tmp_path: Path) -> None:
    whole = quantized_model(tmp_path / "m.gguf")
    with GGUFFile(tmp_path / "m.gguf") as file:
        header = min(info.offset for info in file.tensors.values())
    rng = random.Random(0)
    outcomes = []
    for _ in range(1500):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 4])):
            content[rng.randrange(header)] ^= rng.choice([1 << rng.randrange(8), 0xFF, rng.randrange(1, 256)])
        outcomes.append(outcome(tmp_path / "m.gguf", bytes(content)))
    assert set(outcomes) == {"refused", "read"}
