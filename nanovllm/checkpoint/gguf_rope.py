"""The rotary positions of a GGUF file's model, in the form of Hugging Face's config.json. No torch."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.gguf_header import short

if TYPE_CHECKING:
    from nanovllm.checkpoint.gguf import GGUFFile

FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
ROPE_TENSORS = (FACTORS, LONG_FACTORS, SHORT_FACTORS)  # become part of the config; they are not weights


def rope_config(file: GGUFFile, head_dim: int) -> dict[str, Any]:
    rotated = file.count("rope.dimension_count", default=head_dim)
    config: dict[str, Any] = {"rope_theta": file.real("rope.freq_base", default=10_000.0)}
    if rotated != head_dim:
        if not file.family.partial_rotary or rotated > head_dim:
            raise file.refuse(
                f"rope.dimension_count is {rotated} of {head_dim}; partial rotation is not supported"
                f" for {file.architecture}"
            )
        config["partial_rotary_factor"] = math.nextafter(rotated / head_dim, 1.0)  # times head_dim at least `rotated`
    return config | {"rope_scaling": _scaling(file, rotated)}


def _scaling(file: GGUFFile, rotated: int) -> dict[str, Any] | None:
    """The value of rope_scaling in the HF config. Its type `gguf_factors` is ours: it divides the i-th inverse
    frequency by factors[i]."""
    if FACTORS in file.tensors:
        return {"rope_type": "gguf_factors", "factors": _factors(file, FACTORS, rotated)}
    if LONG_FACTORS in file.tensors or SHORT_FACTORS in file.tensors:
        return {
            "rope_type": "longrope",
            "long_factor": _factors(file, LONG_FACTORS, rotated),
            "short_factor": _factors(file, SHORT_FACTORS, rotated),
            "attention_factor": file.real("rope.scaling.attn_factor", default=1.0),
        }
    kind = file.get("rope.scaling.type")
    if kind in (None, "none"):
        return None
    if kind not in ("linear", "yarn"):
        raise file.refuse(f"rope.scaling.type is {short(kind)}; supported are none, linear and yarn")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": file.real("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = file.count("rope.scaling.original_context_length")
        scaling |= _yarn(file, scaling["factor"])
    return scaling


def _yarn(file: GGUFFile, factor: float) -> dict[str, float]:
    """What the metadata says beyond factor and length."""
    if file.real("rope.scaling.yarn_ext_factor", default=1.0) != 1.0:
        raise file.refuse(f"rope.scaling.yarn_ext_factor is {file.get('rope.scaling.yarn_ext_factor')}; it must be 1")
    keys = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "mscale_all_dim": "yarn_log_multiplier"}
    if file.get("rope.scaling.yarn_log_multiplier") == 0:  # means that there is none
        del keys["mscale_all_dim"]
    stated = {name: f"rope.scaling.{key}" for name, key in keys.items() if file.get(f"rope.scaling.{key}") is not None}
    found = {name: file.real(key) for name, key in stated.items()}
    if "mscale_all_dim" in found:
        found["mscale"] = 1.0
    if file.get("rope.scaling.attn_factor") is not None:
        found["attention_factor"] = file.real("rope.scaling.attn_factor") * (0.1 * math.log(factor) + 1.0)
    return found


def _factors(file: GGUFFile, name: str, rotated: int) -> list[float]:
    info = file.tensor(name)
    if info.type_name != "F32" or info.shape != (rotated // 2,):
        found = f"{info.type_name} of shape {info.shape}"
        raise file.refuse(f"tensor {info.name} is {found}; it must be F32 of shape ({rotated // 2},)")
    raw = bytearray(info.nbytes)
    file.read(info.offset, memoryview(raw))
    factors = list(struct.unpack(f"<{rotated // 2}f", raw))
    if not all(math.isfinite(factor) and factor > 0 for factor in factors):
        raise file.refuse(f"tensor {info.name} is {short(factors)}; every factor must be finite and above 0")
    return factors
