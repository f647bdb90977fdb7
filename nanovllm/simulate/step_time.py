"""Computes how long a step takes, instead of running it on a device.

The model's shape gives the bytes that a step reads and the operations that it does (see bench/roofline.py). The memory
bandwidth and the arithmetic rate that the engine reaches, and a fixed overhead per step, are constants:

    seconds = overhead + linears(tokens) + head(sampled tokens)
            + bytes of the keys and values that decoding reads / bandwidth + operations of the prompts' attention / rate

where linears and head each take the longer of reading their weights and multiplying with them.
"""

from dataclasses import dataclass, field
from typing import Protocol

from nanovllm.bench.roofline import Machine, Roofline
from nanovllm.engine.step_work import StepWork
from nanovllm.errors import ConfigError

# What this engine reaches on an H200, fitted to the latencies of docs/performance.md. The card itself copies 4.28 TB/s
# and multiplies at 796 TFLOP/s. The formula is within 4 % of every latency of Qwen3-8B, and within 12 % of Qwen3-0.6B.
H200 = Machine(bytes_per_second=3.95e12, flops_per_second=660e12)
H200_OVERHEAD = 0.3e-3  # seconds
H200_MEMORY = 139 * 2**30


class StepTime(Protocol):
    """Gives the time of a step in seconds."""

    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True)
class Linear:
    """A linear formula with four given constants, in seconds."""

    step: float
    prefill_token: float
    decode: float
    context_token: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Linear":
        """Parse '4,0.02,0.01' or '4,0.02,0.01,0.00004', in milliseconds."""
        try:
            values = [float(part) / 1e3 for part in text.split(",")]
        except ValueError:
            values = []
        if len(values) not in (3, 4) or not all(0 <= value < float("inf") for value in values) or not values[0]:
            raise ConfigError(
                f"step_time={text!r}: give three or four numbers of milliseconds: per step (above 0), per prompt "
                "token, per decoding sequence, and optionally per context token"
            )
        return cls(*values)

    def seconds(self, work: StepWork) -> float:
        return (
            self.step
            + self.prefill_token * work.num_prefill
            + self.decode * work.num_decodes
            + self.context_token * work.num_context
        )


@dataclass(frozen=True)
class Modelled:
    """The time of a model's shape on a device, from the roofline and a fixed overhead in seconds."""

    roofline: Roofline
    overhead: float
    _layers: dict[float, float] = field(default_factory=dict, repr=False, compare=False)  # by number of tokens
    _head: dict[float, float] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.roofline.has_windows:
            raise ConfigError("models with sliding windows cannot be simulated: give the constants with step_time")

    def seconds(self, work: StepWork) -> float:
        roofline = self.roofline
        num_tokens = work.num_prefill + work.num_decodes
        if num_tokens not in self._layers:
            self._layers[num_tokens] = roofline.layers_seconds(num_tokens)
        if work.num_sampled not in self._head:
            self._head[work.num_sampled] = roofline.head_seconds(work.num_sampled) if work.num_sampled else 0.0
        machine = roofline.machine
        context_bytes = work.num_context * roofline.kv_bytes_per_token
        attention_flops = work.num_scores * roofline.flops_per_score
        return (
            self.overhead
            + self._layers[num_tokens]
            + self._head[work.num_sampled]
            + context_bytes / machine.bytes_per_second
            + attention_flops / machine.flops_per_second
        )


@dataclass(frozen=True)
class Divided:
    """Several devices that divide each step evenly: a step takes as long as one device needs for its part."""

    single: StepTime
    num_devices: int

    def seconds(self, work: StepWork) -> float:
        return self.single.seconds(StepWork(*(amount / self.num_devices for amount in work)))
