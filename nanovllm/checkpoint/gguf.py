"""Read a GGUF file as a model: a config in the form of Hugging Face's config.json, and weights under their HF names."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_families import MODULES, GGUFFamily, family_of
from nanovllm.checkpoint.gguf_header import BLOCKS, TensorInfo, read_header, short
from nanovllm.checkpoint.gguf_rope import ROPE_TENSORS, rope_config
from nanovllm.checkpoint.packed.gguf_types import ALL_FORMS, FORMS
from nanovllm.checkpoint.stored import Part, Stored
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from nanovllm.checkpoint.packed.fp4 import Fp4Pieces
    from nanovllm.checkpoint.packed.groups import Pieces
    from nanovllm.weights.forms import Form

_MAX_SIZE = 1 << 31  # exclusive upper bound of every integer in the config

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z0-9_.]+?)(\.weight|\.bias|)")

_CHUNK_ELEMENTS = 1 << 20  # elements dequantized at a time: 4 MB in float32, plus temporaries of that size
_GGUF_ROW_ELEMENTS = 8192  # gguf.quants.dequantize is fastest with rows of this length


class GGUFFile:
    """An open GGUF file. Opening reads and checks the whole header."""

    def __init__(self, path: Path, *, keeps_vocabulary: bool = True):
        """`keeps_vocabulary`: False if only tensors are needed, which is faster."""
        self.path = Path(path)
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from error
        try:
            self.metadata, self.tensors = read_header(self._file, self.path, keeps_vocabulary=keeps_vocabulary)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def hf_config(self) -> dict[str, Any]:
        """The model's config in the form of Hugging Face's config.json. Does not import torch."""
        num_heads = self.count("attention.head_count")
        hidden_size = self.count("embedding_length")
        head_dim = self.count("attention.key_length", default=max(1, hidden_size // num_heads))
        config = {
            "architectures": [self.family.hf_class],
            "model_type": self.family.model_type,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "num_hidden_layers": self._num_layers(),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self.count("attention.head_count_kv", default=num_heads),
            "head_dim": head_dim,
            "intermediate_size": self.count("feed_forward_length", default=self.get("expert_feed_forward_length")),
            "rms_norm_eps": self.real("attention.layer_norm_rms_epsilon"),
            **rope_config(self, head_dim),
            "max_position_embeddings": self.count("context_length"),
            "vocab_size": self._vocab_size(hidden_size),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "torch_dtype": "float32" if all(t.type_name == "F32" for t in self.tensors.values()) else "bfloat16",
            "bos_token_id": self._token_id("bos_token_id"),
            "eos_token_id": self._token_id("eos_token_id"),
        }
        if not self.family.experts and self.get("expert_count"):
            raise self.refuse(f"expert_count is {short(self.get('expert_count'))} in a {self.architecture} model")
        return config | self.family.config(self, config)

    def generation_config(self) -> dict[str, Any]:
        """The content of generation_config.json: all end-of-sequence token ids, and the BOS token id."""
        ends = [self._token_id(key) for key in ("eos_token_id", "eot_token_id", "eom_token_id")]
        return {
            "eos_token_id": list(dict.fromkeys(token for token in ends if token is not None)),
            "bos_token_id": self._token_id("bos_token_id"),
        }

    def stored_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, Stored]]:
        """Yield (HF name, stored tensor) in file order. A stored tensor is read while the file is open, as `dtype`; a
        vector of float32 is read as it is.

        The experts of a layer are stacked: `mlp.experts.{gate,up,down}_proj.weight` is [experts, out, in].
        """
        yield from self.family.tensors(self, self._tensors_of_file(dtype))

    def _tensors_of_file(self, dtype: torch.dtype) -> Iterator[tuple[str, Stored]]:
        """As the file has them."""
        import torch

        weights = [info for info in self.tensors.values() if info.name not in ROPE_TENSORS]
        named = [(self._hf_name(info.name), info) for info in sorted(weights, key=lambda info: info.offset)]
        rotary_heads = self._permuted_heads()
        for hf_name, info in named:
            heads = rotary_heads.get(info.name.split(".")[-2], 0) if "." in info.name else 0
            blocks = partial(self._blocks, info, heads)
            exact = len(info.shape) == 1 and info.type_name == "F32"  # a norm may be kept in float32
            load = partial(self._load, info, torch.float32 if exact else dtype, heads)
            yield hf_name, _GGUFTensor(info.shape, load, info.type_name, blocks)

    def tensor_types(self) -> Iterator[tuple[str, str]]:
        """Yield (HF name, type) of every weight that may stay packed."""
        yield from ((self._hf_name(i.name), i.type_name) for i in self.tensors.values() if i.name not in ROPE_TENSORS)

    def iter_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor), each read completely."""
        for name, stored in self.stored_tensors(dtype):
            yield name, stored.read()

    def refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in MODULES:
            near = difflib.get_close_matches(str(name), MODULES, n=1)
            hint = f" (nearest: {near[0]})" if near else ""
            known = ", ".join(MODULES)
            raise self.refuse(f"general.architecture is {short(name)}, which is not known{hint}; known: {known}")
        return name

    @cached_property
    def family(self) -> GGUFFamily:
        return family_of(self.architecture)

    def get(self, key: str) -> Any:
        """The metadata value `{architecture}.{key}`. If it is a list with one value per layer, all must be equal, but
        of those that may differ in this family it is the largest."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, list):
            return value
        if key in self.family.uneven and value and all(isinstance(one, int) for one in value):
            return max(value)
        if not value or any(item != value[0] for item in value):
            raise self.refuse(f"{key} differs between layers ({short(value)}); only uniform layers are supported")
        return value[0]

    def per_layer(self, key: str) -> list[Any] | None:
        """The metadata value `{architecture}.{key}` if it is a list; None if it is one value or missing."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        return value if isinstance(value, list) else None

    def count(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _MAX_SIZE:
            raise self.refuse(f"metadata {key} is {short(value)}; it must be an integer from 1 to {_MAX_SIZE - 1}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self.refuse(f"metadata {key} is {short(value)}; it must be a finite number above 0")
        return float(value)

    def _token_id(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        limit = self.tensor("token_embd.weight").shape[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
            raise self.refuse(f"metadata tokenizer.ggml.{key} is {short(value)}; it must be a token id below {limit}")
        return value

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise self.refuse(f"tensor {name} is missing; the file has {len(self.tensors)} other tensors")
        return self.tensors[name]

    def _vocab_size(self, hidden_size: int) -> int:
        shape = self.tensor("token_embd.weight").shape
        if len(shape) != 2 or shape[1] != hidden_size:
            raise self.refuse(f"tensor token_embd.weight has shape {shape}; it must be [vocabulary, {hidden_size}]")
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > shape[0]:
            raise self.refuse(f"the vocabulary has {len(tokens)} tokens, but token_embd.weight only {shape[0]} rows")
        return shape[0]

    def _num_layers(self) -> int:
        stated = self.count("block_count")
        matches = map(_TENSOR_NAME.fullmatch, self.tensors)
        found = {int(match[1]) for match in matches if match and match[1]}
        read = stated - self._num_mtp_layers(stated)
        if len(found) not in (stated, read) or max(found) != len(found) - 1:
            raise self.refuse(f"block_count is {stated}, but tensors of {len(found)} layers are in the file")
        return read

    def _num_mtp_layers(self, num_layers: int) -> int:
        """How many layers at the end propose tokens; they are not read."""
        if self.get("nextn_predict_layers") in (None, 0):
            return 0
        number = self.count("nextn_predict_layers")
        if number >= num_layers:
            raise self.refuse(f"metadata nextn_predict_layers is {number} of {num_layers} layers")
        return number

    def _hf_name(self, name: str) -> str:
        match = _TENSOR_NAME.fullmatch(name)
        layer, part, suffix = match.groups() if match else (None, "", "")
        if layer is not None and self.get("nextn_predict_layers"):
            stated = self.count("block_count")
            if int(layer) >= stated - self._num_mtp_layers(stated):
                return f"mtp.{name}"  # a name that the loader skips with a notice
        known, own = (_TOP_NAMES, self.family.top_names) if layer is None else (_LAYER_NAMES, self.family.names)
        hf_part = own.get(part + suffix) or own.get(part) or known.get(part)
        if hf_part is None:
            raise self.refuse(f"tensor {short(name)} is not a known weight of a {self.architecture} model")
        hf_name = hf_part if part + suffix in own else f"{hf_part}{suffix}"
        return hf_name if layer is None else f"model.layers.{layer}.{hf_name}"

    def _permuted_heads(self) -> dict[str, int]:
        """The number of heads in attn_q and attn_k, if the converter permuted their rows for interleaved RoPE."""
        if not self.family.permuted:
            return {}
        num_heads = self.count("attention.head_count")
        return {"attn_q": num_heads, "attn_k": self.count("attention.head_count_kv", default=num_heads)}

    def _load(self, info: TensorInfo, dtype: torch.dtype, permuted_heads: int, part: Part) -> torch.Tensor:
        """Read, dequantize and convert a tensor, or a part of it, chunk by chunk into the returned tensor.

        Rows outside the part are not read. Columns outside the part are dropped after a chunk is dequantized, because
        quantization blocks span columns.
        """
        import torch

        block, block_bytes = BLOCKS[info.type_name]
        cuts = part + (slice(None),) * (len(info.shape) - len(part))
        wanted = [range(*cut.indices(size)) for cut, size in zip(cuts, info.shape, strict=True)]
        rows, columns, row_elements = _as_matrix(info.shape, wanted, block)
        row_bytes = row_elements // block * block_bytes
        narrowed = len(columns) < row_elements
        tensor = torch.empty([len(one) for one in wanted], dtype=dtype)
        # `units` is a view of `tensor` whose first dimension follows the order of the file; units are read completely.
        if permuted_heads:
            units = self._split_heads(tensor, info, permuted_heads, rows)  # [heads, head_dim / 2, 2, columns]
        elif narrowed:
            units = tensor.view(len(rows), -1)  # [rows, columns]
        else:
            units = tensor.view(-1, block)  # [blocks, elements]
        unit_bytes = len(rows) * row_bytes // units.shape[0]
        step = max(1, min(_CHUNK_ELEMENTS // (unit_bytes // block_bytes * block), units.shape[0]))
        buffer = bytearray(step * unit_bytes)
        for start in range(0, units.shape[0], step):
            target = units[start : start + step]
            size = target.shape[0] * unit_bytes
            self.read(info.offset + rows.start * row_bytes + start * unit_bytes, memoryview(buffer)[:size])
            raw = torch.frombuffer(buffer, dtype=torch.uint8, count=size)
            values = _dequantize(raw.view(-1, block_bytes), info.type_name)
            cut = values.view(-1, row_elements)[:, columns.start : columns.stop] if narrowed else values
            target.copy_(cut.reshape(target.shape))
        return tensor

    def _blocks(self, info: TensorInfo, permuted_heads: int, part: Part) -> tuple[torch.Tensor, range]:
        """The rows of a part, in whole, as stored: uint8 [rows, blocks, bytes]; and the columns of the part."""
        import torch

        block, block_bytes = BLOCKS[info.type_name]
        cuts = part + (slice(None),) * (len(info.shape) - len(part))
        wanted = [range(*cut.indices(size)) for cut, size in zip(cuts, info.shape, strict=True)]
        rows, columns, row_elements = _as_matrix(info.shape, wanted, block)
        row_bytes = row_elements // block * block_bytes
        buffer = bytearray(len(rows) * row_bytes)
        self.read(info.offset + rows.start * row_bytes, memoryview(buffer))
        raw = torch.frombuffer(buffer, dtype=torch.uint8).view(len(rows), row_bytes)
        if permuted_heads:
            ordered = torch.empty_like(raw)
            in_file_order = self._split_heads(ordered, info, permuted_heads, rows)
            in_file_order.copy_(raw.view(in_file_order.shape))
            raw = ordered
        return raw.view(len(rows), -1, block_bytes), columns

    def _split_heads(self, tensor: torch.Tensor, info: TensorInfo, heads: int, rows: range) -> torch.Tensor:
        """View `tensor` as [heads, head_dim / 2, 2, columns], the row order of the file, to undo the permutation."""
        if info.shape[0] % (2 * heads):
            raise self.refuse(
                f"tensor {info.name} has {info.shape[0]} rows; they must divide into {heads} heads of even size"
            )
        head_dim = info.shape[0] // heads
        assert rows.start % head_dim == 0 and len(rows) % head_dim == 0, "a part of q or k must be whole heads"
        return tensor.view(len(rows) // head_dim, 2, head_dim // 2, -1).transpose(1, 2)

    def read(self, offset: int, target: memoryview) -> None:
        self._file.seek(offset)
        if self._file.readinto(target) != len(target):
            raise self.refuse(f"{len(target)} bytes at {offset} cannot be read: the file became shorter while open")


@dataclass(frozen=True)
class _GGUFTensor:
    """A tensor in a GGUF file; implements `Stored`."""

    shape: tuple[int, ...]
    load: Callable[[Part], torch.Tensor]
    type_name: str
    blocks: Callable[[Part], tuple[torch.Tensor, range]]

    def read(self, part: Part = ()) -> torch.Tensor:
        return self.load(part)

    @property
    def form(self) -> Form | None:
        """Which it can have in memory without being dequantized."""
        return ALL_FORMS.get(self.type_name)

    def pieces(self, part: Part, sizes: Any, device: torch.device) -> Pieces | Fp4Pieces:
        """A part in this form, with one scale and one unit per `sizes` columns, or one scale where it has no units."""
        from nanovllm.checkpoint.packed.gguf import mxfp4_pieces, unpack_blocks
        from nanovllm.checkpoint.packed.groups import cut_groups

        raw, columns = self.blocks(part)
        if self.type_name == "MXFP4":
            return mxfp4_pieces(raw.to(device), columns, sizes)
        form, whole = FORMS[self.type_name], unpack_blocks(raw.to(device), self.type_name)
        first, last = (edge * form.bits // 8 for edge in (columns.start, columns.stop))
        own = whole._replace(codes=whole.codes[:, first:last])
        return cut_groups(own, form, self.shape[-1], columns, sizes)

    def with_rows(self, order: Sequence[int]) -> _GGUFTensor:
        """With the row of number `order[i]` at i."""
        import torch

        from nanovllm.checkpoint.reordered import Reordered

        def blocks(part: Part) -> tuple[torch.Tensor, range]:
            rows, *others = part or (slice(None),)
            raw, columns = self.blocks((slice(None), *others))
            return raw[torch.tensor(order[rows])], columns

        return replace(self, load=Reordered(self, order).read, blocks=blocks)


def _as_matrix(shape: tuple[int, ...], wanted: list[range], block: int) -> tuple[range, range, int]:
    """View a tensor as a matrix; return (wanted rows, wanted columns, elements per row).

    `wanted` is the wanted range of each dimension. A vector is one column, or one row if its elements come in blocks.
    """
    if len(shape) == 1:
        return (wanted[0], range(1), 1) if block == 1 else (range(1), wanted[0], shape[0])
    *leading, columns = wanted
    rows = range(1)
    for size, one in zip(shape, leading, strict=False):
        assert len(rows) == 1 or len(one) == size, "a part must be contiguous rows"
        rows = range(rows.start * size + one.start, (rows.stop - 1) * size + one.stop)
    return rows, columns, shape[-1]


def _dequantize(blocks: torch.Tensor, type_name: str) -> torch.Tensor:
    """Dequantize `blocks` [blocks, bytes] to float32; plain F16 and BF16 values keep their type.

    The common types are computed in torch, which is several times faster than the gguf package and bitwise equal.
    """
    import torch

    plain = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if type_name in plain:
        return blocks.view(plain[type_name])
    if type_name == "Q8_0":
        scale = _halves(blocks, 1)
        return blocks[:, 2:].view(torch.int8) * scale
    if type_name == "Q4_0":
        scale = _halves(blocks, 1)
        return _nibbles(blocks[:, 2:]).sub_(8).mul_(scale)
    if type_name == "Q4_1":
        scale, smallest = _halves(blocks, 2).split(1, dim=1)
        return _nibbles(blocks[:, 4:]).mul_(scale).add_(smallest)
    return _dequantize_by_package(blocks, type_name)


def _halves(blocks: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` float16 numbers of every block, as float32 [blocks, count]."""
    import torch

    return blocks[:, : 2 * count].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack [blocks, n] bytes to float32 [blocks, 2n]: the low four bits of all bytes, then the high four bits."""
    import torch

    values = torch.empty(packed.shape[0], 2, packed.shape[1])
    values[:, 0] = packed & 15
    values[:, 1] = packed >> 4
    return values.view(packed.shape[0], -1)


def _dequantize_by_package(blocks: torch.Tensor, type_name: str) -> torch.Tensor:
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    num_blocks, block_bytes = blocks.shape
    row_blocks = _GGUF_ROW_ELEMENTS // BLOCKS[type_name][0]
    if num_blocks % row_blocks:
        row_blocks = num_blocks
    rows = blocks.numpy().reshape(-1, row_blocks * block_bytes)
    with np.errstate(all="ignore"):  # a damaged file may contain infinite scales; no warning is needed for them
        return torch.from_numpy(dequantize(rows, GGMLQuantizationType[type_name]))
