"""The packed forms that weights of quantized checkpoints have in memory, and which module has which. No torch."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Fp8Form:
    """8-bit floating point numbers (e4m3): w = q * scale."""

    block: tuple[int, int] | None = None  # rows and columns that share a scale; None = one scale per row
    rounds_inputs: bool = True  # the inputs of the product are rounded to fp8 as well


Form = Fp8Form


@dataclass(frozen=True)
class Packing:
    """How a quantized checkpoint stores its linears."""

    method: str  # quant_method of the config
    rules: tuple[tuple[str, Form | None], ...]  # pattern and form; the first pattern found in a module's name counts

    def form_of(self, module: str) -> Form | None:
        """`module`: such as model.layers.0.mlp.up_proj. None = not quantized."""
        return next((form for pattern, form in self.rules if re.search(pattern, module)), None)

    @property
    def forms(self) -> list[Form]:
        """Every form that occurs."""
        return list(dict.fromkeys(form for _, form in self.rules if form is not None))
