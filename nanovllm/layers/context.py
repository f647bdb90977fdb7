"""What every layer is built with: one frozen object per rank. Questions about the device are answered here."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from nanovllm.distributed.group import ALONE, Group
from nanovllm.layers.spec import RopeSpec, Weight
from nanovllm.weights.formats import WeightFormats

if TYPE_CHECKING:
    from nanovllm.attention.interface import AttentionBackend
    from nanovllm.weights.format import WeightFormat


@dataclass(frozen=True, kw_only=True)
class BuildContext:
    dtype: torch.dtype  # the model computes in
    device: torch.device
    attention: "AttentionBackend"
    ropes: tuple[RopeSpec, ...] = ()  # of the model's layers, in the order of the backend's rotary tables
    group: Group = ALONE  # tensor parallel ranks, which divide each layer
    weight_formats: WeightFormats = WeightFormats()  # of linears and experts
    prefix: str = ""  # of the names of the part's tensors in checkpoints
    deterministic: bool = False  # a row's result must not depend on how many others there are
    kernels: bool = False  # our Triton kernels run on the device
    gluon: bool = False  # and those written in Gluon
    pdl: bool = False  # kernels may be launched while the one before still runs (programmatic dependent launch)

    @classmethod
    def on(
        cls, device: torch.device, *, group: Group = ALONE, deterministic: bool = False, **settings: Any
    ) -> "BuildContext":
        """The context of a device, which says what kernels can run."""
        if device.type != "cpu":
            from nanovllm.kernels.features import features_of

            settings |= features_of(device.type)
        group = group.in_order() if deterministic else group
        return cls(device=device, group=group, deterministic=deterministic, **settings)

    def within(self, prefix: str) -> "BuildContext":
        """For a part of a part."""
        return replace(self, prefix=self.prefix + prefix)

    def format_of(self, weight: Weight) -> "WeightFormat":
        return self.weight_formats.of(self.prefix, weight, self.group.size)
