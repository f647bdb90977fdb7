"""How long a step takes: a formula in place of a device.

The model's shape gives what a step must read and compute (see bench/roofline.py); what a device reaches of its copy
bandwidth and matrix rate, and the time that a step takes beside them, are constants:

    seconds = overhead + linears(tokens) + head(sampled tokens)
            + bytes of the keys and values that decoding reads / bandwidth + operations of the prompts' attention / rate

where linears and head each take the longer of reading their weights and multiplying with them.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nanovllm.bench.roofline import Machine, Roofline
from nanovllm.errors import ConfigError

# What this engine reaches on an H200: fitted to the latencies of docs/performance.md, where the card copies 4.28 TB/s
# and multiplies at 796 TFLOP/s. Of Qwen3-8B every figure there is met within 4 %, of Qwen3-0.6B within 12 %.
H200 = Machine(bytes_per_second=3.95e12, flops_per_second=660e12)
H200_OVERHEAD = 0.3e-3  # seconds
H200_MEMORY = 139 * 2**30


class StepWork(NamedTuple):
    """What one step does. Numbers are not whole where several devices share the work."""

    num_prefill: float  # prompt tokens computed
    num_decodes: float  # sequences that advance by one token
    num_sampled: float  # tokens that come out: of the decodes, and of prompts that end with this step
    num_context: float  # tokens whose keys and values the decodes read
    num_scores: float  # pairs of a prompt token and one that it looks at


class StepTime(Protocol):
    def seconds(self, work: StepWork) -> float: ...


@dataclass(frozen=True)
class Linear:
    """Four given constants, in seconds."""

    step: float
    prefill_token: float
    decode: float
    context_token: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Linear":
        """'4,0.02,0.01' or '4,0.02,0.01,0.00004', in milliseconds."""
        try:
            values = [float(part) / 1e3 for part in text.split(",")]
        except ValueError:
            values = []
        if len(values) not in (3, 4) or not all(0 <= value < float("inf") for value in values) or not values[0]:
            raise ConfigError(
                f"step_time={text!r}: three or four numbers of milliseconds are needed, a step's (over 0), "
                "a prompt token's, a decoding sequence's and a context token's"
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
    """A model's shape on a device."""

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
    """Several devices that share each step evenly: it takes as long as one device takes for its part."""

    single: StepTime
    num_devices: int

    def seconds(self, work: StepWork) -> float:
        return self.single.seconds(StepWork(*(amount / self.num_devices for amount in work)))
