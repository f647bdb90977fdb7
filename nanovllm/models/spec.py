"""A model's shape, read from a Hugging Face style config; no torch.

`rope_theta`/`rope_scaling` (older) and `rope_parameters` (transformers 5) are both read, and so are `dtype` and
`torch_dtype`. What this decoder would compute differently from the reference is refused here, never ignored.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nanovllm.errors import CheckpointError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
ROPE_TYPES = ("default", "linear", "llama3", "gguf_factors")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    theta: float
    rope_type: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    factors: tuple[float, ...] = ()  # of "gguf_factors": one divisor per frequency


@dataclass(frozen=True, kw_only=True)
class MoeConfig:
    num_experts: int
    num_experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool
    dense_layers: frozenset[int] = frozenset()  # layers with an ordinary MLP


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position: int
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint
    eos_token_ids: tuple[int, ...] = ()
    # what families differ in
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()  # a layer each; None = full attention
    moe: MoeConfig | None = None

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        return self.moe is not None and layer not in self.moe.dense_layers

    def num_parameters(self) -> int:
        """All weights, counted once where embedding and head are tied."""
        hidden = self.hidden_size
        embeddings = self.vocab_size * hidden * (1 if self.tie_word_embeddings else 2)
        attention = hidden * (2 * self.q_size + 2 * self.kv_size) + 2 * hidden
        attention += (self.q_size + 2 * self.kv_size) * self.qkv_bias + hidden * self.o_bias
        attention += 2 * self.head_dim * self.qk_norm
        mlp = 3 * hidden * self.intermediate_size + (2 * self.intermediate_size + hidden) * self.mlp_bias
        num_moe = sum(self.is_moe_layer(layer) for layer in range(self.num_layers))
        total = embeddings + hidden + self.num_layers * attention + (self.num_layers - num_moe) * mlp
        if self.moe is not None:
            experts = self.moe.num_experts * 3 * hidden * self.moe.intermediate_size
            total += num_moe * (experts + self.moe.num_experts * hidden)
        return total

    def kv_bytes_per_token(self, dtype: str) -> int:
        if dtype == "float8_e4m3fn":  # a byte a number, and a 16-bit scale a head
            return 2 * self.num_layers * (self.kv_size + 2 * self.num_kv_heads)
        return 2 * self.num_layers * self.kv_size * DTYPE_BYTES[dtype]

    def with_eos(self, eos_token_ids: tuple[int, ...]) -> "ModelConfig":
        return replace(self, eos_token_ids=eos_token_ids)


def read_model_config(raw: dict[str, Any], *, architecture: str, differences: dict[str, Any]) -> ModelConfig:
    """The part of a config that all Llama-shaped families spell alike, with a family's differences laid over it."""
    act = raw.get("hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise CheckpointError(f"hidden_act={act!r}: only silu is implemented for {architecture}")
    num_heads = count(raw, "num_attention_heads")
    num_kv_heads = raw.get("num_key_value_heads") or num_heads
    hidden_size = count(raw, "hidden_size")
    if num_heads % num_kv_heads:
        raise CheckpointError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")
    num_layers = count(raw, "num_hidden_layers")
    max_position = count(raw, "max_position_embeddings")
    settings: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": count(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": count(raw, "intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": raw.get("head_dim") or hidden_size // num_heads,
        "rms_norm_eps": float(raw.get("rms_norm_eps", 1e-6)),
        "rope": read_rope(raw, max_position=max_position),
        "max_position": max_position,
        "tie_word_embeddings": bool(raw.get("tie_word_embeddings", False)),
        "dtype": _dtype(raw),
        "eos_token_ids": token_id_list(raw.get("eos_token_id")),
        "windows": (None,) * num_layers,
    }
    return ModelConfig(**(settings | differences))


def read_rope(raw: dict[str, Any], *, max_position: int) -> RopeConfig:
    scaling = dict(raw.get("rope_scaling") or {})
    parameters = {**scaling, **(raw.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta", raw.get("rope_theta", 10000.0)))
    if parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise CheckpointError("partial_rotary_factor: rotating only a part of each head is not implemented")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise CheckpointError(f"rope_type={kind!r} is not implemented; known: {', '.join(ROPE_TYPES)}")
    return RopeConfig(
        theta=theta,
        rope_type=kind,
        factor=float(parameters.get("factor", 1.0)),
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        original_max_position=int(parameters.get("original_max_position_embeddings", max_position)),
        factors=tuple(float(f) for f in parameters.get("factors", ())),
    )


def layer_windows(raw: dict[str, Any]) -> tuple[int | None, ...]:
    """Qwen's way to say which layers slide: `layer_types`, or `use_sliding_window` from `max_window_layers` on."""
    num_layers = raw["num_hidden_layers"]
    window = raw.get("sliding_window")
    if not window or not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    kinds = raw.get("layer_types")
    if kinds is None:
        first = raw.get("max_window_layers", num_layers)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def token_id_list(value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not a {type(content).__name__}; fetch the file again")
    return content


def count(raw: dict[str, Any], name: str, *, most: int | None = None) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1 or (most is not None and value > most):
        limit = "" if most is None else f" and at most {most}"
        raise CheckpointError(f"config: {name}={value!r} must be an integer of at least 1{limit}")
    return value


def _dtype(raw: dict[str, Any]) -> str:
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise CheckpointError(f"config: dtype={name!r}; known: {', '.join(DTYPE_BYTES)}")
    return name
