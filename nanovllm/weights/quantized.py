"""What a quantized checkpoint, or the option `quantization`, makes of the weight formats."""

from collections.abc import Callable
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.weights.format import WeightFormat
from nanovllm.weights.forms import Packing
from nanovllm.weights.int8 import Int8Format
from nanovllm.weights.packed import made_while_loading

FORMATS: dict[str, Callable[[], WeightFormat]] = {"int8": Int8Format}  # one for all weights, made while loading


def quantized(quantization: str | None, packing: Packing | None, *, dummy: bool) -> dict[str, Any]:
    """The fields of `WeightFormats` that are not at their defaults."""
    is_gguf = packing is not None and packing.layout == "gguf"
    if quantization == "gguf" and (dummy or not is_gguf):
        what = "load_format='dummy' does not read it" if is_gguf else "the model is none"
        raise ConfigError(f"quantization='gguf' keeps the weights of a GGUF file packed, and {what}")
    if quantization == "gguf" or (quantization is None and not is_gguf):
        return {"packing": packing, "quantizes": dummy}
    if quantization is None:
        return {}
    if quantization in ("fp8", "int4"):
        return {"packing": made_while_loading(quantization), "quantizes": True}
    return {"made": FORMATS[quantization]()}
