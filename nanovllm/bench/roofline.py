"""The least time that a machine needs for some work: what it must at least read, and what it must at least compute.

A decode step cannot be quicker than its data comes out of memory: all weights that its tokens pass through, once for
the whole batch, and the keys and values of every sequence, which no batch shares. A prefill cannot be quicker than
its arithmetic. Both limits are measured here, on the machine at hand, with the simplest work there is:

  copy bandwidth   a large buffer copied within the device's memory, bytes read and bytes written both counted
  matmul rate      a large square product of random numbers, in the type that the model computes in

Counted: the weights of the layers and of the head (a step's linears take the longer of reading their weights and
multiplying with them: from some 190 rows on an H200 it is the latter), the KV cache up to each token's own position,
the attention of prompts. The head is counted for sampled tokens only. Of a mixture of experts, as many experts are
read as a batch of that size touches when it spreads evenly. Not counted: the embedding's rows, activations, logits,
sampling, launches, Python. So no engine reaches 1 on a large model, and the distance to it is what is left to gain. (On
a CPU a copy is a weak yardstick: it also reads what it overwrites, and a small model stays in the cache.)
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from nanovllm.models.spec import DTYPE_BYTES, ModelConfig

if TYPE_CHECKING:
    import torch

    from nanovllm.llm import LLM

GPU_COPY_BYTES, GPU_MATMUL_SIZE = 1 << 32, 8192
CPU_COPY_BYTES, CPU_MATMUL_SIZE = 1 << 28, 1024
NUM_WARM_UPS, NUM_RUNS = 3, 11
FP8_SCALE_BYTES = 2  # of a token's key, or value, in one head


@dataclass(frozen=True)
class Machine:
    bytes_per_second: float
    flops_per_second: float

    def row(self) -> dict[str, float]:
        return {
            "copy_gigabytes_per_second": self.bytes_per_second / 1e9,
            "matmul_teraflops": self.flops_per_second / 1e12,
        }


@dataclass(frozen=True)
class Roofline:
    """Least seconds on `machine` for a model whose weights and cached keys and values take so many bytes."""

    machine: Machine
    model: ModelConfig
    weight_bytes: int  # of one weight
    kv_head_bytes: int  # of one token's key, or value, in one head of one layer

    def workload_seconds(self, input_lens: Sequence[int], output_lens: Sequence[int]) -> float:
        """All prompts computed in one go, which gives each request its first token; then all of them decode together.

        A request takes part in `output_len - 1` decode steps, so the batch gets smaller as the short ones end. Limits
        of the engine, such as the size of its KV cache or of its batch, are not the machine's and are not counted.
        """
        num_steps = [output_len - 1 for output_len in output_lens]
        batch_sizes = [sum(step < count for count in num_steps) for step in range(max(num_steps))]
        kv_tokens = sum(
            self._kv_tokens(input_len + 1, input_len + count)
            for input_len, count in zip(input_lens, num_steps, strict=True)
        )
        decode = sum(map(self._weights_seconds, batch_sizes)) + self._kv_seconds(kv_tokens)
        return self.prefill_seconds(input_lens) + decode

    def prefill_seconds(self, input_lens: Sequence[int]) -> float:
        """Whole prompts at once, up to the first sampled token of each."""
        model = self.model
        scores = sum(self._kv_tokens(1, input_len) for input_len in input_lens)
        attention_flops = 2 * 2 * model.q_size * scores  # queries times keys, probabilities times values
        linears = self.layers_seconds(sum(input_lens)) + self.head_seconds(len(input_lens))
        return linears + attention_flops / self.machine.flops_per_second

    def step_seconds(self, batch_size: int, context: int) -> float:
        """A decode step of sequences that have `context` tokens each, the newest included."""
        return self._weights_seconds(batch_size) + self._kv_seconds(batch_size * self._kv_tokens(context, context))

    def _weights_seconds(self, batch_size: int) -> float:
        return self.layers_seconds(batch_size) + self.head_seconds(batch_size)

    def layers_seconds(self, num_tokens: float) -> float:
        """The linears of all layers, for the tokens of one step."""
        model = self.model
        head = model.vocab_size * model.hidden_size
        always = model.num_parameters() - head * (1 if model.tie_word_embeddings else 2)
        if model.moe is None:
            return self._linear_seconds(num_tokens, num_read=always, num_used=always)
        num_layers = sum(map(model.is_moe_layer, range(model.num_layers)))
        expert = 3 * model.hidden_size * model.moe.intermediate_size
        always -= num_layers * model.moe.num_experts * expert
        untouched = (1 - model.moe.num_experts_per_token / model.moe.num_experts) ** num_tokens
        return self._linear_seconds(
            num_tokens,
            num_read=always + num_layers * expert * model.moe.num_experts * (1 - untouched),
            num_used=always + num_layers * expert * model.moe.num_experts_per_token,
        )

    def head_seconds(self, num_tokens: float) -> float:
        """The output head, for the sampled tokens of one step."""
        head = self.model.vocab_size * self.model.hidden_size
        return self._linear_seconds(num_tokens, num_read=head, num_used=head)

    def _linear_seconds(self, num_tokens: float, *, num_read: float, num_used: float) -> float:
        """`num_read` weights are touched by any of the tokens, `num_used` by each."""
        read = num_read * self.weight_bytes / self.machine.bytes_per_second
        compute = 2 * num_used * num_tokens / self.machine.flops_per_second
        return max(read, compute)

    def _kv_seconds(self, kv_tokens: int) -> float:
        token_bytes = 2 * self.model.num_kv_heads * self.kv_head_bytes
        return kv_tokens * token_bytes / self.machine.bytes_per_second

    def _kv_tokens(self, first: int, last: int) -> int:
        """Tokens looked at, summed over the layers, by queries whose contexts are `first`, ..., `last` tokens long."""
        return sum(_sum_of_least(first, last, window) for window in self.model.windows)


def _sum_of_least(first: int, last: int, limit: int | None) -> int:
    """The sum of min(x, limit) for x = first, ..., last."""
    if limit is None or last <= limit:
        return (first + last) * (last - first + 1) // 2
    if first > limit:
        return limit * (last - first + 1)
    return _sum_of_least(first, limit, None) + limit * (last - limit)


# --- of an engine -----------------------------------------------------------------------------------------------------


def roofline_of(llm: "LLM") -> Roofline:
    """The roofline of an engine's model on its device. Measuring needs memory: close the engine first."""
    from nanovllm.runner.device import resolve_device, resolve_dtype

    device = resolve_device(llm.config.device)
    dtype = resolve_dtype(llm.config.dtype, llm.model_config.dtype, device)
    cache = llm.config.kv_cache_dtype
    return Roofline(
        machine=measure(device, dtype),
        model=llm.model_config,
        weight_bytes=dtype.itemsize,
        kv_head_bytes=kv_head_bytes(llm.model_config, dtype.itemsize, cache),
    )


def kv_head_bytes(model: ModelConfig, value_bytes: int, cache_dtype: str) -> int:
    """`cache_dtype` as the option has it; "auto" = values as the model computes them."""
    if cache_dtype.startswith("fp8"):
        return model.head_dim + FP8_SCALE_BYTES
    return model.head_dim * DTYPE_BYTES.get(cache_dtype, value_bytes)


# --- of the machine ---------------------------------------------------------------------------------------------------


def measure(device: "torch.device", dtype: "torch.dtype") -> Machine:
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
    """With random numbers: a chip that multiplies zeros draws less power, and runs faster, than one at work."""
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
