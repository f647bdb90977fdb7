"""Which weight format each weight of a model has: the one that the option `quantization` names, or the checkpoint's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.errors import ConfigError
from nanovllm.layers.spec import Weight
from nanovllm.weights.dense import DenseFormat

if TYPE_CHECKING:
    from nanovllm.weights.format import WeightFormat
    from nanovllm.weights.forms import Packing


def _int8() -> "WeightFormat":
    from nanovllm.weights.int8 import Int8Format

    return Int8Format()


FORMATS: dict[str, Callable[[], "WeightFormat"]] = {"int8": _int8}  # made while loading


@dataclass(frozen=True)
class WeightFormats:
    made: "WeightFormat" = DenseFormat()  # of every weight that may have another format than dense
    packing: "Packing | None" = None  # the formats of a quantized checkpoint, by name
    quantizes: bool = False  # tensors of the checkpoint are converted to these formats

    def of(self, prefix: str, weight: Weight, num_ranks: int = 1) -> "WeightFormat":
        """The format of a weight whose tensors' names begin with `prefix` in checkpoints."""
        if self.packing is None:
            return self.made if weight.packable else DenseFormat()
        from nanovllm.weights.packed import packed_format

        return packed_format(self.packing, prefix, weight, num_ranks, quantizes=self.quantizes)


def weight_formats(quantization: str | None, packing: "Packing | None" = None, *, dummy: bool = False) -> WeightFormats:
    """`quantization` None = as the checkpoint has them: in the model's dtype or packed, but a GGUF file is unpacked."""
    is_gguf = packing is not None and packing.layout == "gguf"
    if quantization == "gguf" and (dummy or not is_gguf):
        what = "load_format='dummy' does not read it" if is_gguf else "the model is none"
        raise ConfigError(f"quantization='gguf' keeps the weights of a GGUF file packed, and {what}")
    if quantization == "gguf" or (quantization is None and not is_gguf):
        return WeightFormats(packing=packing, quantizes=dummy)
    if quantization is None:
        return WeightFormats()
    if quantization in ("fp8", "int4"):
        from nanovllm.weights.packed import made_while_loading

        return WeightFormats(packing=made_while_loading(quantization), quantizes=True)
    if quantization not in FORMATS:
        raise ConfigError(f"quantization={quantization!r}: no such weight format; known: {', '.join(FORMATS)}")
    return WeightFormats(FORMATS[quantization]())
