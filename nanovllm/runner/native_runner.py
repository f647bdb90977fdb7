"""The runner of a CPU with the native library: the whole step of the model is one call of C."""

import ctypes
from typing import Any, cast

import torch

from nanovllm.attention.backend import CacheShape
from nanovllm.attention.rotation import rotary_table
from nanovllm.config import Config
from nanovllm.layers.context import BuildContext
from nanovllm.models.decoder import Decoder
from nanovllm.models.shard import shard_of
from nanovllm.models.spec import ModelSpec
from nanovllm.native.support import FORMS_MADE, attention_specs, cache_dtype, forms_to_make, keeps_packed
from nanovllm.runner.model_runner import ModelRunner
from nanovllm.runner.native_model import NativeBackend, NativeModel
from nanovllm.runner.native_sampler import NativeSampler
from nanovllm.runner.sampling import Sampling


class NativeRunner(ModelRunner):
    """For models and options that native/support.py has no reason against."""

    def __init__(self, library: ctypes.CDLL, *arguments: Any, **settings: Any) -> None:
        self._library = library
        super().__init__(*arguments, **settings)
        sampler = NativeSampler(library, self.table, self.model.spec.vocab_size)
        self._sampling = Sampling(self._stage, self.table, sampler)

    def _build_model(self, config: Config, model_config: ModelSpec, max_model_len: int) -> None:
        mixers = attention_specs(model_config)
        mixer = mixers[0]
        shape = CacheShape(
            num_heads=mixer.num_heads,
            num_kv_heads=mixer.num_kv_heads,
            head_dim=mixer.head_dim,
            block_size=config.kv_cache_block_size,
            windows=tuple(each.window for each in mixers),
            dtype=torch.float32,
            cache_dtype=getattr(torch, cache_dtype(config, model_config)),
            device=self.device,
        )
        self.backend = NativeBackend(shape, mixers)
        self._context = BuildContext.on(self.device, dtype=torch.float32, attention=self.backend)
        self._native = NativeModel(
            shard_of(model_config, self._parallel.rank),
            self._library,
            rotary={
                own.rope: rotary_table(own.rope, head_dim=own.head_dim, max_position=max_model_len, device=self.device)
                for own in {each.rope: each for each in mixers}.values()
            },
            block_size=config.kv_cache_block_size,
            num_threads=torch.get_num_threads(),
            packs=keeps_packed(config) and config.quantization not in FORMS_MADE,
            makes=forms_to_make(config, model_config),
            kv_dtype=shape.cache_dtype,
            rounds_inputs=config.dtype == "bfloat16",
        )
        self.model = cast(Decoder, self._native)  # it has the methods that the runner calls

    def close(self) -> None:
        self._native.close()
        del self._native
        super().close()
