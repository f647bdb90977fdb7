"""The weight formats by the name that the option `quantization` gives them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from nanovllm.errors import ConfigError
from nanovllm.weights.dense import DenseFormat

if TYPE_CHECKING:
    from nanovllm.weights.format import WeightFormat


def _int8() -> "WeightFormat":
    from nanovllm.weights.int8 import Int8Format

    return Int8Format()


FORMATS: dict[str, Callable[[], "WeightFormat"]] = {"int8": _int8}


def weight_format(quantization: str | None) -> "WeightFormat":
    """None = dense, in the model's dtype."""
    if quantization is None:
        return DenseFormat()
    if quantization not in FORMATS:
        raise ConfigError(f"quantization={quantization!r}: no such weight format; known: {', '.join(FORMATS)}")
    return FORMATS[quantization]()
