"""Which weight format each weight of a model has: the one that the option `quantization` names, or the checkpoint's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.layers.spec import Weight
from nanovllm.weights.dense import DenseFormat

if TYPE_CHECKING:
    from nanovllm.weights.format import WeightFormat
    from nanovllm.weights.forms import Packing


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
    if quantization is None and packing is None:
        return WeightFormats()
    from nanovllm.weights.quantized import quantized

    return WeightFormats(**quantized(quantization, packing, dummy=dummy))
