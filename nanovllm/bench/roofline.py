"""The roofline: the minimum time for some work, from the bytes that it must read and the operations that it must do.

A decode step takes at least the time to read its data from memory: the weights that its tokens use, once for the whole
batch, and the KV cache of every sequence. A prefill takes at least the time of its arithmetic. Both limits are measured
on this machine:

  copy bandwidth   copying a large buffer within the device's memory; bytes read and bytes written both count
  matmul rate      multiplying large square matrices of random numbers in the model's data type

Included: the weights of the layers and of the head (a linear takes the longer of reading its weights and multiplying
with them; on an H200 the latter from about 190 rows on), the KV cache up to each token's position, the states per
sequence, which every decoded token reads and writes, and the attention of prompts. The head counts for sampled tokens
only. Of a mixture of experts, as many experts are read as a batch of that
size uses if its tokens spread evenly. Not included: the rows of the embedding, activations, logits, sampling, kernel
launches, Python. So no engine reaches 1 on a large model. (On a CPU the copy bandwidth is a rough limit: a copy also
reads what it overwrites, and a small model stays in the cache.)
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import TYPE_CHECKING

from nanovllm.layers.shared_kv_spec import SharedKvAttentionSpec
from nanovllm.layers.spec import AttentionSpec, Weight
from nanovllm.models.parameters import parameters
from nanovllm.models.shard import whole_model
from nanovllm.models.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from nanovllm.llm import LLM

GPU_COPY_BYTES, GPU_MATMUL_SIZE = 1 << 32, 8192
CPU_COPY_BYTES, CPU_MATMUL_SIZE = 1 << 28, 1024
NUM_WARM_UPS, NUM_RUNS = 3, 11


@dataclass(frozen=True)
class Machine:
    """The speed of a device."""

    bytes_per_second: float
    flops_per_second: float

    def row(self) -> dict[str, float]:
        return {
            "copy_gigabytes_per_second": self.bytes_per_second / 1e9,
            "matmul_teraflops": self.flops_per_second / 1e12,
        }


@dataclass(frozen=True)
class Roofline:
    """Minimum times of a model on `machine`, from what its layers state about their weights and state."""

    machine: Machine
    model: ModelSpec
    weight_bytes: int  # of one weight in the model's dtype
    kv_dtype: str  # of the KV cache
    packed_bytes: Callable[[str, Weight], int] | None = None  # of a weight with this prefix; None = all are dense

    def workload_seconds(self, input_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        """All prompts in one step, which gives each request its first token; then all requests decode together.

        A request takes part in `output_len - 1` decode steps, so the batch becomes smaller as requests end. Limits of
        the engine, such as the size of its KV cache or of its batch, are not included.
        """
        num_steps = [output_len - 1 for output_len in output_lens]
        batch_sizes = [sum(step < count for count in num_steps) for step in range(max(num_steps))]
        kv_bytes = sum(
            self._kv_bytes(input_len + 1, input_len + count)
            for input_len, count in zip(input_lens, num_steps, strict=True)
        )
        decode = sum(map(self._weights_seconds, batch_sizes)) + kv_bytes / self.machine.bytes_per_second
        return self.prefill_seconds(input_lens) + decode

    def prefill_seconds(self, input_lens: Sequence[int]) -> float:
        """One step that computes all prompts and samples the first token of each."""
        attention_flops = sum(self._attention_flops(1, input_len) for input_len in input_lens)
        linears = self.layers_seconds(sum(input_lens)) + self.head_seconds(len(input_lens))
        return linears + attention_flops / self.machine.flops_per_second

    def step_seconds(self, batch_size: int, context: int) -> float:
        """A decode step of sequences with `context` tokens each, including the newest."""
        kv_seconds = batch_size * self._kv_bytes(context, context) / self.machine.bytes_per_second
        return self._weights_seconds(batch_size) + kv_seconds

    def _weights_seconds(self, batch_size: int) -> float:
        return self.layers_seconds(batch_size) + self.head_seconds(batch_size)

    def layers_seconds(self, num_tokens: float) -> float:
        """The linears of all layers, for the tokens of one step."""
        read, used = 0.0, 0.0  # bytes that any of the tokens needs; weights that each token is multiplied with
        for num_bytes, weight in self._layer_weights:
            touched = 1.0
            if weight.num_experts:
                touched -= (1 - weight.num_active / weight.num_experts) ** num_tokens
            read += num_bytes * touched
            used += weight.num_parameters * (weight.num_active / weight.num_experts if weight.num_experts else 1)
        return self._linear_seconds(num_tokens, num_bytes=read, num_used=used)

    def head_seconds(self, num_tokens: float) -> float:
        """The output head, for the sampled tokens of one step."""
        head = self.model.head_weight()
        return self._linear_seconds(num_tokens, num_bytes=self._num_bytes("", head), num_used=head.num_parameters)

    @cached_property
    def _layer_weights(self) -> list[tuple[int, Weight]]:
        """The weights of all layers and of the norm before the head, each with its bytes."""
        ends = {self.model.embedding_weight().names, self.model.head_weight().names}
        if self.model.per_layer is not None:
            ends.add(self.model.per_layer.table().names)
        inner = [(prefix, weight) for prefix, weight in parameters(whole_model(self.model)) if weight.names not in ends]
        return [(self._num_bytes(prefix, weight), weight) for prefix, weight in inner]

    def _num_bytes(self, prefix: str, weight: Weight) -> int:
        if self.packed_bytes is None:
            return weight.num_parameters * self.weight_bytes
        return self.packed_bytes(prefix, weight)

    def _linear_seconds(self, num_tokens: float, *, num_bytes: float, num_used: float) -> float:
        read = num_bytes / self.machine.bytes_per_second
        compute = 2 * num_used * num_tokens / self.machine.flops_per_second
        return max(read, compute)

    @cached_property
    def _attention(self) -> list[AttentionSpec]:
        """The attention of every layer that has one. A layer that shares the KV of an earlier one reads as much."""
        mixers = [layer.mixer for layer in self.model.layers]
        mixers = [mixer.attention if isinstance(mixer, SharedKvAttentionSpec) else mixer for mixer in mixers]
        return [mixer for mixer in mixers if isinstance(mixer, AttentionSpec)]

    def _kv_bytes(self, first: int, last: int) -> int:
        """Bytes of the KV cache that queries with contexts of `first`, ..., `last` tokens read, in all layers; and of
        the states per sequence, each read and written once a token."""
        row_bytes = sum(group.num_bytes for group in self.model.state_groups() if not group.paged)
        return 2 * row_bytes * (last - first + 1) + sum(
            _sum_of_least(first, last, mixer.window) * mixer.state(self.kv_dtype).bytes_per_token
            for mixer in self._attention
        )

    def _attention_flops(self, first: int, last: int) -> int:
        """Operations of the same queries: queries times keys, and probabilities times values."""
        return sum(_flops_per_score(mixer) * _sum_of_least(first, last, mixer.window) for mixer in self._attention)

    @property
    def has_windows(self) -> bool:
        return any(mixer.window is not None for mixer in self._attention)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return sum(mixer.state(self.kv_dtype).bytes_per_token for mixer in self._attention)

    @property
    def flops_per_score(self) -> int:
        """Operations for one pair of a query and a key, in all layers."""
        return sum(map(_flops_per_score, self._attention))


def _flops_per_score(mixer: AttentionSpec) -> int:
    """Operations of one layer for one pair of a query and a key; one of another kind states them itself."""
    return getattr(mixer, "flops_per_score", 2 * 2 * mixer.num_heads * mixer.head_dim)


def _sum_of_least(first: int, last: int, limit: int | None) -> int:
    """The sum of min(x, limit) for x = first, ..., last."""
    if limit is None or last <= limit:
        return (first + last) * (last - first + 1) // 2
    if first > limit:
        return limit * (last - first + 1)
    return _sum_of_least(first, limit, None) + limit * (last - limit)


# --- the roofline of an engine ----------------------------------------------------------------------------------------


def roofline_of(llm: "LLM") -> Roofline:
    """The roofline of an engine's model on its device. Measuring needs memory: close the engine first."""
    from nanovllm.runner.device import resolve_device, resolve_dtype
    from nanovllm.weights.formats import weight_formats

    device = resolve_device(llm.config.device)
    dtype = resolve_dtype(llm.config.dtype, llm.model_config.dtype, device)
    formats = weight_formats(llm.config.quantization, llm.model_config.packing)

    def packed_bytes(prefix: str, weight: Weight) -> int:
        return formats.of(prefix, weight).num_bytes(weight.shard_shape(0, 1), dtype.itemsize)

    return Roofline(
        machine=measure(device, dtype),
        model=llm.model_config,
        weight_bytes=dtype.itemsize,
        kv_dtype=kv_dtype(llm.config.kv_cache_dtype, str(dtype).removeprefix("torch.")),
        packed_bytes=packed_bytes,
    )


def kv_dtype(option: str, model_dtype: str) -> str:
    """The data type of the KV cache for the option kv_cache_dtype; "auto" means the model's data type."""
    if option.startswith("fp8"):
        return "float8_e4m3fn"
    return model_dtype if option == "auto" else option


# --- measuring the machine --------------------------------------------------------------------------------------------


def measure(device: "torch.device", dtype: "torch.dtype") -> Machine:
    """Measure copy bandwidth and matmul rate of the device."""
    import torch

    on_gpu = device.type == "cuda"
    machine = Machine(
        bytes_per_second=_copy_bandwidth(GPU_COPY_BYTES if on_gpu else CPU_COPY_BYTES, device),
        flops_per_second=_matmul_rate(GPU_MATMUL_SIZE if on_gpu else CPU_MATMUL_SIZE, device, dtype),
    )
    if on_gpu:
        torch.cuda.empty_cache()
    return machine


def _copy_bandwidth(num_bytes: int, device: "torch.device") -> float:
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / _median_seconds(lambda: target.copy_(source), device)


def _matmul_rate(size: int, device: "torch.device", dtype: "torch.dtype") -> float:
    """Uses random numbers: with zeros a GPU draws less power and runs faster than with real data."""
    import torch

    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    product = torch.empty_like(left)
    return 2 * size**3 / _median_seconds(lambda: torch.mm(left, right, out=product), device)


def _median_seconds(work: Callable[[], object], device: "torch.device") -> float:
    for _ in range(NUM_WARM_UPS):
        work()
    timed = _gpu_seconds if device.type == "cuda" else _cpu_seconds
    return median(timed(work) for _ in range(NUM_RUNS))


def _cpu_seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _gpu_seconds(work: Callable[[], object]) -> float:
    import torch

    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
