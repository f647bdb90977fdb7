"""Read a GGUF file as a model: a config in the form of Hugging Face's config.json, and weights under their HF names."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_header import BLOCKS, TensorInfo, read_header, short
from nanovllm.checkpoint.packed.gguf_types import FORMS
from nanovllm.checkpoint.stored import Part, Stored
from nanovllm.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from nanovllm.checkpoint.packed.groups import Pieces
    from nanovllm.weights.forms import GroupForm

_GEMMA3_27B_LAYERS = 62
_MAX_SIZE = 1 << 31  # exclusive upper bound of every integer in the config

_FAMILIES = {  # general.architecture: (HF class, HF model_type)
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}

_ROPE_FACTORS = "rope_freqs.weight"  # this tensor becomes part of the config; it is not a weight
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
_GEMMA3_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_TENSOR_NAME = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_]+)\.(weight|bias)")

_CHUNK_ELEMENTS = 1 << 20  # elements dequantized at a time: 4 MB in float32, plus temporaries of that size
_GGUF_ROW_ELEMENTS = 8192  # gguf.quants.dequantize is fastest with rows of this length


class GGUFFile:
    """An open GGUF file. Opening reads and checks the whole header."""

    def __init__(self, path: Path):
        self.path = Path(path)
        try:
            self._file = self.path.open("rb")
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot be opened: {error.strerror}") from error
        try:
            self.metadata, self.tensors = read_header(self._file, self.path)
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
        architecture = self._architecture()
        hf_class, model_type = _FAMILIES[architecture]
        num_heads = self._count("attention.head_count")
        hidden_size = self._count("embedding_length")
        head_dim = self._count("attention.key_length", default=max(1, hidden_size // num_heads))
        config = {
            "architectures": [hf_class],
            "model_type": model_type,
            "hidden_act": "silu",
            "hidden_size": hidden_size,
            "num_hidden_layers": self._num_layers(),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._count("attention.head_count_kv", default=num_heads),
            "head_dim": head_dim,
            "intermediate_size": self._count("feed_forward_length"),
            "rms_norm_eps": self._real("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._real("rope.freq_base", default=10_000.0),
            "rope_scaling": self._rope_scaling(head_dim),
            "max_position_embeddings": self._count("context_length"),
            "vocab_size": self._vocab_size(hidden_size),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "torch_dtype": "float32" if all(t.type_name == "F32" for t in self.tensors.values()) else "bfloat16",
            "bos_token_id": self._token_id("bos_token_id"),
            "eos_token_id": self._token_id("eos_token_id"),
        }
        if architecture == "llama" and f"{architecture}.attention.sliding_window" in self.metadata:
            config |= {
                "architectures": ["MistralForCausalLM"],
                "model_type": "mistral",
                "sliding_window": self._count("attention.sliding_window"),
            }
        if architecture == "gemma3":
            config |= self._gemma3_config(config)
        return config | self._moe_config(architecture)

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
        import torch

        weights = [info for info in self.tensors.values() if info.name != _ROPE_FACTORS]
        named = [(self._hf_name(info.name), info) for info in sorted(weights, key=lambda info: info.offset)]
        rotary_heads = self._permuted_heads()
        for hf_name, info in named:
            heads = rotary_heads.get(info.name.split(".")[-2], 0)
            blocks = partial(self._blocks, info, heads)
            exact = len(info.shape) == 1 and info.type_name == "F32"  # a norm may be kept in float32
            load = partial(self._load, info, torch.float32 if exact else dtype, heads)
            yield hf_name, _GGUFTensor(info.shape, load, info.type_name, blocks)

    def tensor_types(self) -> Iterator[tuple[str, str]]:
        """Yield (HF name, type) of every weight."""
        yield from ((self._hf_name(i.name), i.type_name) for i in self.tensors.values() if i.name != _ROPE_FACTORS)

    def iter_tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (HF name, tensor), each read completely."""
        for name, stored in self.stored_tensors(dtype):
            yield name, stored.read()

    def _refuse(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {problem}")

    def _architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in _FAMILIES:
            known = ", ".join(_FAMILIES)
            raise self._refuse(f"general.architecture is {short(name)}, which is not supported; supported are: {known}")
        return name

    def _get(self, key: str) -> Any:
        """The metadata value `{architecture}.{key}`. If it is a list with one value per layer, all must be equal."""
        value = self.metadata.get(f"{self._architecture()}.{key}")
        if not isinstance(value, list):
            return value
        if not value or any(item != value[0] for item in value):
            raise self._refuse(f"{key} differs between layers ({short(value)}); only uniform layers are supported")
        return value[0]

    def _count(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < _MAX_SIZE:
            raise self._refuse(f"metadata {key} is {short(value)}; it must be an integer from 1 to {_MAX_SIZE - 1}")
        return value

    def _real(self, key: str, default: float | None = None) -> float:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise self._refuse(f"metadata {key} is {short(value)}; it must be a finite number above 0")
        return float(value)

    def _token_id(self, key: str) -> int | None:
        value = self.metadata.get(f"tokenizer.ggml.{key}")
        if value is None:
            return None
        limit = self._tensor("token_embd.weight").shape[0]
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < limit:
            raise self._refuse(f"metadata tokenizer.ggml.{key} is {short(value)}; it must be a token id below {limit}")
        return value

    def _tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise self._refuse(f"tensor {name} is missing; the file has {len(self.tensors)} other tensors")
        return self.tensors[name]

    def _vocab_size(self, hidden_size: int) -> int:
        shape = self._tensor("token_embd.weight").shape
        if len(shape) != 2 or shape[1] != hidden_size:
            raise self._refuse(f"tensor token_embd.weight has shape {shape}; it must be [vocabulary, {hidden_size}]")
        tokens = self.metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > shape[0]:
            raise self._refuse(f"the vocabulary has {len(tokens)} tokens, but token_embd.weight only {shape[0]} rows")
        return shape[0]

    def _num_layers(self) -> int:
        stated = self._count("block_count")
        matches = map(_TENSOR_NAME.fullmatch, self.tensors)
        found = {int(match[1]) for match in matches if match and match[1]}
        if len(found) != stated or max(found) != stated - 1:
            raise self._refuse(f"block_count is {stated}, but tensors of {len(found)} layers are in the file")
        return stated

    def _rope_scaling(self, head_dim: int) -> dict[str, Any] | None:
        """The value of rope_scaling in the HF config. Its type `gguf_factors` is ours: it divides the i-th inverse
        frequency by factors[i]."""
        rotated = self._count("rope.dimension_count", default=head_dim)
        if rotated != head_dim:
            raise self._refuse(f"rope.dimension_count is {rotated} of {head_dim}; partial rotation is not supported")
        if _ROPE_FACTORS in self.tensors:
            return {"rope_type": "gguf_factors", "factors": self._rope_factors(head_dim)}
        kind = self._get("rope.scaling.type")
        if kind in (None, "none"):
            return None
        if kind not in ("linear", "yarn"):
            raise self._refuse(f"rope.scaling.type is {short(kind)}; supported are none, linear and yarn")
        scaling: dict[str, Any] = {"rope_type": kind, "factor": self._real("rope.scaling.factor")}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = self._count("rope.scaling.original_context_length")
        return scaling

    def _rope_factors(self, head_dim: int) -> list[float]:
        info = self.tensors[_ROPE_FACTORS]
        if info.type_name != "F32" or info.shape != (head_dim // 2,):
            found = f"{info.type_name} of shape {info.shape}"
            raise self._refuse(f"tensor {info.name} is {found}; it must be F32 of shape ({head_dim // 2},)")
        raw = bytearray(info.nbytes)
        self._read(info.offset, memoryview(raw))
        factors = list(struct.unpack(f"<{head_dim // 2}f", raw))
        if not all(math.isfinite(factor) and factor > 0 for factor in factors):
            raise self._refuse(f"tensor {info.name} is {short(factors)}; every factor must be finite and above 0")
        return factors

    def _moe_config(self, architecture: str) -> dict[str, Any]:
        if architecture != "qwen3moe":
            if self._get("expert_count"):
                raise self._refuse(f"expert_count is {short(self._get('expert_count'))} in a {architecture} model")
            return {}
        normed = self._get("expert_weights_norm")
        return {
            "num_experts": self._count("expert_count"),
            "num_experts_per_tok": self._count("expert_used_count"),
            "moe_intermediate_size": self._count("expert_feed_forward_length"),
            "norm_topk_prob": True if normed is None else bool(normed),
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }

    def _gemma3_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """What the metadata does not state is as in llama.cpp: with 62 layers, queries have another scale."""
        width = config["hidden_size"] // config["num_attention_heads"]
        return {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": width if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS else config["head_dim"],
            "sliding_window": self._count("attention.sliding_window"),
            "sliding_window_pattern": self._count("attention.sliding_window_pattern", default=6),
            "rope_local_base_freq": self._real("rope.freq_base_swa", default=10_000.0),
            "attn_logit_softcapping": self._get("attn_logit_softcapping"),
            "final_logit_softcapping": self._get("final_logit_softcapping") or None,
            "norm_offset": 0.0,  # the file has 1 + w
        }

    def _hf_name(self, name: str) -> str:
        match = _TENSOR_NAME.fullmatch(name)
        layer, part, suffix = match.groups() if match else (None, "", "")
        layer_names = _GEMMA3_NAMES if self._architecture() == "gemma3" else _LAYER_NAMES
        hf_part = (_TOP_NAMES if layer is None else layer_names).get(part)
        if hf_part is None:
            raise self._refuse(f"tensor {short(name)} is not a known weight of a {self._architecture()} model")
        return f"{hf_part}.{suffix}" if layer is None else f"model.layers.{layer}.{hf_part}.{suffix}"

    def _permuted_heads(self) -> dict[str, int]:
        """The number of heads in attn_q and attn_k, if the converter permuted their rows for interleaved RoPE."""
        if self._architecture() != "llama":
            return {}
        num_heads = self._count("attention.head_count")
        return {"attn_q": num_heads, "attn_k": self._count("attention.head_count_kv", default=num_heads)}

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
            self._read(info.offset + rows.start * row_bytes + start * unit_bytes, memoryview(buffer)[:size])
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
        self._read(info.offset + rows.start * row_bytes, memoryview(buffer))
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
            raise self._refuse(
                f"tensor {info.name} has {info.shape[0]} rows; they must divide into {heads} heads of even size"
            )
        head_dim = info.shape[0] // heads
        assert rows.start % head_dim == 0 and len(rows) % head_dim == 0, "a part of q or k must be whole heads"
        return tensor.view(len(rows) // head_dim, 2, head_dim // 2, -1).transpose(1, 2)

    def _read(self, offset: int, target: memoryview) -> None:
        self._file.seek(offset)
        if self._file.readinto(target) != len(target):
            raise self._refuse(f"{len(target)} bytes at {offset} cannot be read: the file became shorter while open")


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
    def form(self) -> GroupForm | None:
        """Which it can have in memory without being dequantized."""
        return FORMS.get(self.type_name)

    def pieces(self, part: Part, sizes: tuple[int, int], device: torch.device) -> Pieces:
        """A part in this form, with one scale and one unit per `sizes` columns."""
        from nanovllm.checkpoint.packed.gguf import unpack_blocks
        from nanovllm.checkpoint.packed.groups import cut_groups

        raw, columns = self.blocks(part)
        form, whole = FORMS[self.type_name], unpack_blocks(raw.to(device), self.type_name)
        first, last = (edge * form.bits // 8 for edge in (columns.start, columns.stop))
        own = whole._replace(codes=whole.codes[:, first:last])
        return cut_groups(own, form, self.shape[-1], columns, sizes)


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
