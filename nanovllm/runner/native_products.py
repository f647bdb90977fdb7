"""The runner of a CPU for models that the native step does not compute: layers of torch whose products are native."""

import ctypes
from dataclasses import replace
from typing import Any

import torch

from nanovllm.config import Config
from nanovllm.models.spec import ModelSpec
from nanovllm.native.formats import NativeFormats, Products
from nanovllm.native.support import forms_to_make, keeps_packed
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.native_sampler import NativeSampler
from nanovllm.runner.sampling import Sampling
from nanovllm.weights.formats import WeightFormats, weight_formats


class NativeProductsRunner(ModelRunner):
    """In float32, as the native step."""

    def __init__(self, library: ctypes.CDLL, *arguments: Any, **settings: Any) -> None:
        self._products = Products(library, torch.get_num_threads())
        super().__init__(*arguments, **settings)
        sampler = NativeSampler(library, self.table, self.model.spec.vocab_size)
        self._sampling = Sampling(self._stage, self.table, sampler)

    def _build_model(self, config: Config, model_config: ModelSpec, max_model_len: int) -> None:
        self._formats = native_formats(config, model_config, self._products)
        super()._build_model(replace(config, dtype="float32"), model_config, max_model_len)

    def _weight_formats(self, config: Config, model_config: ModelSpec) -> WeightFormats:
        return self._formats

    def close(self) -> None:
        super().close()
        self._products.close()


def native_formats(config: Config, model: ModelSpec, products: Products) -> NativeFormats:
    plain = weight_formats(config.quantization, model.packing, dummy=config.load_format == "dummy")
    return NativeFormats(
        made=plain.made,
        packing=plain.packing,
        quantizes=plain.quantizes,
        products=products,
        stored=model.packing,
        packs=keeps_packed(config),
        makes=forms_to_make(config, model),
    )
