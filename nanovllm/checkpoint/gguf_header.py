"""Read the header of a GGUF file (metadata, and the tensors' offsets) with a parser that checks everything it reads."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PREAMBLE = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata pairs
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# The `struct` format of each metadata value type. Strings and arrays have readers of their own.
_NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Limits far above what real files need: the largest vocabularies have about 300,000 tokens.
_MAX_NAME_BYTES = 65_535
_MAX_STRING_BYTES = 1 << 24
_MAX_ARRAY_ITEMS = 1 << 22  # in all arrays of a file together
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4
_SMALLEST_PAIR = 8 + 4 + 1  # bytes: key length, value type, a one-byte value
_SMALLEST_TENSOR_INFO = 8 + 4 + 8 + 4 + 8  # bytes: name length, number of dimensions, one dimension, type, offset

# ggml's tensor type id: (name, elements per block, bytes per block)
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    39: ("MXFP4", 32, 17),
}
BLOCKS = {name: (elements, size) for name, elements, size in _TENSOR_TYPES.values()}  # type name: (elements, bytes)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header says about one tensor."""

    name: str
    shape: tuple[int, ...]  # slowest dimension first, as in torch
    type_name: str
    offset: int  # from the start of the file, in bytes
    nbytes: int


def read_header(
    file: BufferedReader, path: Path, *, keeps_vocabulary: bool = True
) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
    """Return the metadata and the tensors by name. `path` is used in error messages.

    `keeps_vocabulary`: False leaves lists of strings empty, which takes a third of the time.
    """
    size = file.seek(0, 2)
    if size < _PREAMBLE.size:
        raise CheckpointError(f"{path}: {size} bytes are too few for a GGUF file")
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _HeaderReader(data, path, keeps_vocabulary).read()


class _HeaderReader:
    """Reads the header from front to back; checks every length against the size of the file before using it."""

    def __init__(self, data: mmap.mmap, path: Path, keeps_vocabulary: bool):
        self._data = data
        self._keeps_vocabulary = keeps_vocabulary
        self._size = len(data)
        self._path = path
        self._position = 0
        self._array_items_left = _MAX_ARRAY_ITEMS

    def read(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        num_tensors, num_pairs = self._preamble()
        metadata = self._pairs(num_pairs)
        if metadata.get("split.count", 1) not in (0, 1):
            count = short(metadata["split.count"])
            raise self._refuse(f"is one of {count} parts; join them first, for example with llama-gguf-split --merge")
        alignment = self._alignment(metadata)
        tensors = [self._tensor_info(alignment) for _ in range(num_tensors)]
        return metadata, self._with_file_offsets(tensors, alignment)

    def _refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {problem}")

    def _preamble(self) -> tuple[int, int]:
        magic, version, num_tensors, num_pairs = _PREAMBLE.unpack_from(self._data)
        self._position = _PREAMBLE.size
        if magic != _MAGIC:
            raise self._refuse(f"is not a GGUF file: it begins with {magic!r}, not with {_MAGIC!r}")
        if version not in _VERSIONS:
            raise self._refuse(f"is GGUF version {version:#x}; supported are versions 2 and 3, little-endian")
        self._check_count(num_pairs, _SMALLEST_PAIR, "metadata pairs")
        self._check_count(num_tensors, _SMALLEST_TENSOR_INFO, "tensors")
        return num_tensors, num_pairs

    def _check_count(self, count: int, item_bytes: int, what: str) -> None:
        left = self._size - self._position
        if count * item_bytes > left:
            raise self._refuse(f"states {count} {what} of at least {item_bytes} bytes, but only {left} bytes follow")

    def _take(self, count: int, what: str) -> int:
        """Advance by `count` bytes and return the position where they begin."""
        start = self._position
        if count > self._size - start:
            left = self._size - start
            raise self._refuse(f"ends inside {what}: {count} bytes are needed at {start}, {left} are there")
        self._position += count
        return start

    def _u32(self, what: str) -> int:
        return _U32.unpack_from(self._data, self._take(4, what))[0]

    def _u64(self, what: str) -> int:
        return _U64.unpack_from(self._data, self._take(8, what))[0]

    def _string(self, what: str, limit: int = _MAX_STRING_BYTES) -> str:
        length = self._u64(what)
        if length > limit:
            raise self._refuse(f"{what} has a length of {length} bytes; at most {limit} are accepted")
        start = self._take(length, what)
        try:
            return self._data[start : start + length].decode()
        except UnicodeDecodeError as error:
            raise self._not_text(error, what) from error

    def _not_text(self, error: UnicodeDecodeError, what: str) -> CheckpointError:
        return self._refuse(f"{what} is not UTF-8 text: {short(error.object)}")

    def _pairs(self, count: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        for index in range(count):
            key = self._string(f"the key of metadata pair {index}", _MAX_NAME_BYTES)
            if key in pairs:
                raise self._refuse(f"metadata key {short(key)} occurs twice")
            what = f"metadata {short(key)}"
            pairs[key] = self._value(self._u32(what), what, depth=0)
        return pairs

    def _value(self, kind: int, what: str, depth: int) -> Any:
        if kind == _STRING:
            return self._string(what)
        if kind == _ARRAY:
            return self._array(what, depth + 1)
        return self._numbers(kind, 1, what)[0]

    def _numbers(self, kind: int, count: int, what: str) -> tuple[Any, ...]:
        if kind not in _NUMBER_FORMATS:
            raise self._refuse(f"{what} has the unknown value type {kind}")
        layout = struct.Struct(f"<{count}{_NUMBER_FORMATS[kind]}")
        return layout.unpack_from(self._data, self._take(layout.size, what))

    def _array(self, what: str, depth: int) -> list[Any]:
        if depth > _MAX_ARRAY_DEPTH:
            raise self._refuse(f"{what} nests arrays deeper than {_MAX_ARRAY_DEPTH}")
        kind, count = self._u32(what), self._u64(what)
        if count > self._array_items_left:
            raise self._refuse(f"{what} has {count} array items; at most {_MAX_ARRAY_ITEMS} are accepted in a file")
        self._array_items_left -= count
        if kind == _STRING:
            return self._strings(count, what)
        if kind == _ARRAY:
            return [self._array(what, depth + 1) for _ in range(count)]
        return list(self._numbers(kind, count, what))

    def _strings(self, count: int, what: str) -> list[str]:
        """Read an array of strings. A vocabulary has hundreds of thousands, so the loop makes no calls per string."""
        data, size, position, length_at = self._data, self._size, self._position, _U64.unpack_from
        keeps = self._keeps_vocabulary
        raw: list[bytes] = []
        for index in range(count):
            length = length_at(data, position)[0] if position + 8 <= size else 0
            start = position + 8
            position = start + length
            if position > size or length > _MAX_STRING_BYTES:
                raise self._refuse(f"{what}: item {index} of {count} runs past the end of the file, or is too long")
            if keeps:
                raw.append(data[start:position])
        self._position = position
        try:
            return [item.decode() for item in raw]
        except UnicodeDecodeError as error:
            raise self._not_text(error, what) from error

    def _alignment(self, metadata: dict[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or value & (value - 1):
            raise self._refuse(f"general.alignment is {short(value)}; it must be a power of two")
        return value

    def _tensor_info(self, alignment: int) -> TensorInfo:
        name = self._string("a tensor's name", _MAX_NAME_BYTES)
        what = f"tensor {short(name)}"
        num_dims = self._u32(what)
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._refuse(f"{what} has {num_dims} dimensions; there must be 1 to {_MAX_DIMS}")
        shape = tuple(reversed([self._u64(what) for _ in range(num_dims)]))
        kind, offset = self._u32(what), self._u64(what)
        if 0 in shape:
            raise self._refuse(f"{what} has shape {shape}; no dimension may be 0")
        if kind not in _TENSOR_TYPES:
            known = ", ".join(BLOCKS)
            raise self._refuse(f"{what} has the ggml type {kind}, which is not supported; supported are: {known}")
        type_name, block, block_bytes = _TENSOR_TYPES[kind]
        if shape[-1] % block:
            raise self._refuse(f"{what} has rows of {shape[-1]} elements; {type_name} needs multiples of {block}")
        if offset % alignment:
            raise self._refuse(
                f"{what} begins at offset {offset}, which is not a multiple of the alignment {alignment}"
            )
        return TensorInfo(name, shape, type_name, offset, math.prod(shape) // block * block_bytes)

    def _with_file_offsets(self, tensors: list[TensorInfo], alignment: int) -> dict[str, TensorInfo]:
        """Replace offsets into the data section by offsets into the file; refuse tensors that overlap or do not fit."""
        data_start = -(-self._position // alignment) * alignment
        placed: dict[str, TensorInfo] = {}
        for info in tensors:
            if info.name in placed:
                raise self._refuse(f"tensor {short(info.name)} occurs twice")
            offset = data_start + info.offset
            if offset + info.nbytes > self._size:
                needed = f"{info.nbytes} bytes at {offset}"
                raise self._refuse(
                    f"tensor {short(info.name)} needs {needed}, but the file ends at {self._size}: was it cut short?"
                )
            placed[info.name] = TensorInfo(info.name, info.shape, info.type_name, offset, info.nbytes)
        in_order = sorted(placed.values(), key=lambda info: info.offset)
        for before, after in zip(in_order, in_order[1:], strict=False):
            if before.offset + before.nbytes > after.offset:
                raise self._refuse(f"tensors {short(before.name)} and {short(after.name)} overlap at {after.offset}")
        return placed


def short(value: Any) -> str:
    """The value's repr for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
