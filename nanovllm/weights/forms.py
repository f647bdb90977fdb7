"""The packed forms that weights of quantized checkpoints have in memory, and which module has which. No torch."""

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from nanovllm.checkpoint.names import FileNames


@dataclass(frozen=True)
class Fp8Form:
    """8-bit floating point numbers (e4m3): w = q * scale."""

    block: tuple[int, int] | None = None  # rows and columns that share a scale; None = one scale per row
    rounds_inputs: bool = True  # the inputs of the product are rounded to fp8 as well


@dataclass(frozen=True)
class GroupForm:
    """Integers with a scale per group of columns: w = (q - zero) * scale, or w = q * scale - minimum."""

    bits: int  # 4 or 8
    group_size: int  # columns that share a scale; 0 = all of a row
    zero: bool = False  # a zero per group; otherwise the middle of the range stands for 0
    ordered: bool = False  # a column's group is not given by its place (desc_act, actorder)
    minimum: bool = False  # a minimum per group
    scale_dtype: str = "float16"
    unit_size: int = 0  # scales and minima are small integers, in units that so many columns share; 0 = they are not

    def sizes_in(self, num_columns: int, *starts: int) -> tuple[int, int]:
        """Columns that share a scale, and that share a unit, in a matrix of so many columns of which parts begin at
        `starts`."""
        unit = math.gcd(self.unit_size, *starts) if self.unit_size else 0
        return math.gcd(self.group_size or num_columns, *starts), unit

    def dividing(self, num_columns: int) -> "GroupForm":
        """With groups that divide the columns of a matrix that is packed while loading."""
        return replace(self, group_size=math.gcd(self.group_size, num_columns)) if self.group_size else self


@dataclass(frozen=True)
class Fp4Form:
    """4-bit floating point numbers (e2m1) with a scale per group of columns: w = q * scale."""

    group_size: int
    has_unit: bool = False  # scales (e4m3) are multiplied with a number that a row has; otherwise they are e8m0

    def group_in(self, *starts: int) -> int:
        """Columns that share a scale in a matrix of which parts begin at `starts`."""
        return math.gcd(self.group_size, *starts)


@dataclass(frozen=True)
class Int8Form:
    """8-bit integers with one scale per row: w = q * scale."""

    rounds_inputs: bool = True  # the inputs of the product are rounded to 8 bits per token


Form = Fp8Form | GroupForm | Fp4Form | Int8Form
# Which modules have a form, None = stay dense: a regular expression, or names of modules or of what contains them, also
# without what comes before ("mlp.gate"). Names are a set: a config may list hundreds, and a checkpoint may have tens of
# thousands of modules.
Rule = tuple[str | frozenset[str], Form | None]
INT4 = GroupForm(4, 128, zero=True)  # made while loading
# The head, when linears are packed while loading: its rounding errors are errors of the logits, of which those of fp8
# and int4 cost 30 to 50 times as much likelihood (docs/quantization.md).
HEAD = Int8Form(rounds_inputs=False)


@dataclass(frozen=True)
class Packing:
    """How a quantized checkpoint stores its linears."""

    layout: str  # of its files: fp8, compressed-tensors, modelopt, awq, gptq, gptq_v2, mxfp4, bitsandbytes, gguf
    rules: tuple[Rule, ...] = ()  # the first that fits a module counts
    modules: tuple[tuple[str, Form], ...] = ()  # or, where there are no rules: the form of each module that has one

    def form_of(self, module: str) -> Form | None:
        """`module`: such as model.layers.0.mlp.up_proj. None = not quantized."""
        if self.modules:
            return self._by_name.get(module)
        return next((form for which, form in self.rules if _fits(which, module)), None)

    @cached_property
    def _by_name(self) -> dict[str, Form]:
        return dict(self.modules)

    @property
    def forms(self) -> list[Form]:
        """Every form that occurs."""
        return list(dict.fromkeys(form for _, form in (*self.rules, *self.modules) if form is not None))

    def in_specs(self, names: FileNames | None) -> "Packing":
        """With names of modules as in the layers' specs, where those of the files differ. Patterns stay as they are."""
        if names is None:
            return self

        def both(modules: frozenset[str]) -> frozenset[str]:
            return modules | {names.in_specs(f".{module}.").strip(".") for module in modules}

        rules = ((which if isinstance(which, str) else both(which), form) for which, form in self.rules)
        return replace(self, rules=tuple(rules))

    def with_scales(self, dtype: str) -> "Packing":
        """With scales of groups in this type."""
        return replace(
            self,
            rules=tuple(
                (pattern, replace(form, scale_dtype=dtype) if isinstance(form, GroupForm) else form)
                for pattern, form in self.rules
            ),
        )


def _fits(which: str | frozenset[str], module: str) -> bool:
    if isinstance(which, str):
        return re.search(which, module) is not None
    parts = module.split(".")
    ends = range(1, len(parts) + 1)
    return any(".".join(parts[begin:end]) in which for end in ends for begin in range(end))
