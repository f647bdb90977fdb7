"""Every option of the engine with its help text, its default and its checks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.option import check_options, integer, number, of_type, one_of, option, refuse
from nanovllm.state import BlockGroup, CacheLayout

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "fp8")
ATTENTION_BACKENDS = ("auto", "sdpa", "triton")
DISTRIBUTED_EXECUTOR_BACKENDS = ("mp", "ray")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
QUANTIZATIONS: tuple[str, ...] = ("fp8", "int8", "int4", "gguf")
FRACTION = number(0, 1, open_low=True, text="must be a number in (0, 1]")
SECONDS = number(0, math.inf, open_low=True, text="must be a number of seconds above 0")
POSITIVE, FLAG = integer(1), of_type(bool)


class AdjustableInt(int):
    """A default that is changed to fit if it contradicts an option that the user set."""


def _known_quantization(value: object) -> str | None:
    return None if value in QUANTIZATIONS else f"must be {' or '.join(['None', *map(repr, QUANTIZATIONS)])}"


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """The numbers that the scheduler and the block manager need."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    groups: tuple[BlockGroup, ...]  # of paged state
    enable_prefix_caching: bool
    keeps_row_state: bool = False  # a layer keeps state outside of the blocks

    @property
    def num_blocks(self) -> int:
        return sum(group.num_blocks for group in self.groups)

    @property
    def max_cached_tokens(self) -> int:
        """Maximum number of tokens of a sequence that runs alone."""
        return int(min([self.max_model_len, *(group.max_num_tokens(self.block_size) for group in self.groups)]))


@dataclass(frozen=True, kw_only=True)
class Config:
    """The options of an engine. Construction checks them and raises `ConfigError`.

    `Config.from_options` also accepts earlier spellings, and suggests the nearest name for an unknown one.
    """

    # model
    model: str | None = option(
        None,
        "Folder with safetensors files, .gguf file, or Hugging Face hub id (org/name). Without it, the small default "
        "model is used.",
        of_type(str),
    )
    tokenizer: str | None = option(
        None, "Folder to read the tokenizer from. Without it, the model's own is used.", of_type(str)
    )
    # limits
    # The default is 128 rows for each of an H200's 132 multiprocessors, which fills whole waves of matrix tiles.
    max_num_batched_tokens: int = option(
        AdjustableInt(16896),
        "Maximum number of tokens computed in one step, prompt and generated tokens together. Longer prompts are "
        "computed in chunks over several steps. A larger value speeds up prompts and takes more memory. The default is "
        "raised to max_num_seqs if that is larger.",
        POSITIVE,
    )
    max_num_seqs: int = option(
        AdjustableInt(1024),
        "Maximum number of sequences that run at the same time. Further requests wait in the queue. The default is "
        "lowered to max_num_batched_tokens if that is smaller.",
        POSITIVE,
    )
    target_itl_ms: float | None = option(
        None,
        "Milliseconds between two tokens of a sequence that a step should not exceed: while sequences decode, prompts "
        "are computed in chunks that take about this long, longer if many sequences decode or many prompts wait. 0 "
        "means no limit. Without it, the server and AsyncLLM use 22, and LLM has no limit.",
        number(0, math.inf),
    )
    max_model_len: int = option(
        4096,
        "Maximum length of a sequence in tokens, prompt and output together. It is lowered to the model's own limit.",
        POSITIVE,
    )
    # memory
    gpu_memory_utilization: float = option(
        0.9,
        "Fraction of the GPU's memory that may be in use, other programs' memory included. The KV cache gets what "
        "weights and activations leave of it.",
        FRACTION,
    )
    cpu_memory_utilization: float = option(
        0.25, "On a CPU: fraction of the free memory that the KV cache may take.", FRACTION
    )
    kv_cache_memory_bytes: int | None = option(
        None,
        "Bytes of the KV cache (units K, M, G, T on the command line). It overrides the two fractions of memory.",
        POSITIVE,
    )
    num_kv_cache_blocks: int = option(
        -1,
        "Number of KV cache blocks; in a model whose layers have different windows, of the layers that keep the most "
        "tokens. It overrides all other memory options; -1 means that they decide.",
        integer(1, also=(-1,)),
    )
    kv_cache_block_size: int = option(32, "Number of tokens in one KV cache block, a multiple of 16.", POSITIVE)
    enable_prefix_caching: bool = option(
        True,
        "Keep the KV cache blocks of earlier prompts and reuse them for prompts that begin with the same tokens.",
        FLAG,
    )
    # device
    device: str = option(
        "auto", "Device to run on: cpu or cuda. auto means cuda if a GPU is available.", one_of(DEVICES)
    )
    dtype: str = option(
        "auto",
        "Data type of weights and activations: float32, bfloat16 or float16. auto means the checkpoint's, or float32 "
        "on a CPU that cannot compute in 16 bits; a quantized GGUF file on a CPU stays packed, with 8-bit activations. "
        "On a CPU with AMX bfloat16 rounds activations as well, and auto computes exactly.",
        one_of(DTYPES),
    )
    kv_cache_dtype: str = option(
        "auto",
        "Data type of the KV cache: float32, bfloat16, float16, or fp8 (GPU only, half the memory of bfloat16). "
        "auto means the data type of the activations; float16 for packed weights on an x86 CPU with AVX512.",
        one_of(KV_CACHE_DTYPES),
    )
    attention_backend: str = option(
        "auto",
        "Attention implementation: sdpa (PyTorch only) or triton (nanovllm's own kernels, GPU only). auto means "
        "triton where it can run.",
        one_of(ATTENTION_BACKENDS),
    )
    cpu_kernels: str = option(
        "auto",
        "On a CPU: native (nanovllm's C library, built at first use) or torch. auto means native as far as possible.",
        one_of(("auto", "native", "torch")),
    )
    enforce_eager: bool = option(
        False, "On a GPU: launch the kernels of a decode step one by one instead of replaying a CUDA graph.", FLAG
    )
    deterministic: bool = option(
        False,
        "Compute a request's tokens bit for bit the same whatever else is in the batch. This is slower on a GPU.",
        FLAG,
    )
    overlap: bool | None = option(
        None,
        "Schedule the next step while the current one runs on the device. Without it: on for a GPU, off for a CPU.",
        FLAG,
    )
    # several devices
    tensor_parallel_size: int = option(1, "Number of devices that each layer is divided over.", POSITIVE)
    pipeline_parallel_size: int = option(
        1,
        "Number of pipeline stages. Each stage holds a part of the layers and uses tensor_parallel_size devices.",
        POSITIVE,
    )
    distributed_executor_backend: str | None = option(
        None,
        "How the workers of several devices run: mp (processes on this host) or ray (Ray actors). Without it, mp is "
        "used if there is more than one device.",
        one_of(DISTRIBUTED_EXECUTOR_BACKENDS),
    )
    worker_timeout: float = option(
        60.0, "Seconds that a step may take in a worker before the engine treats the worker as hung and stops.", SECONDS
    )
    # loading
    quantization: str | None = option(
        None,
        "Weight format. Made while loading: fp8 and int8 = 8-bit weights with one scale per output row (fp8 rounds "
        "activations, too), int4 = 4-bit weights with a scale and a zero for each 128 inputs. gguf = the weights of a "
        "GGUF file stay packed, which needs less memory and is slower. Without it, a GGUF file is unpacked to the "
        "model's dtype (see cpu_kernels for CPUs), and other checkpoints are kept as they are.",
        _known_quantization,
    )
    load_format: str = option(
        "auto",
        "Format of the weights: safetensors, gguf, or dummy (random weights, no files read but the config). auto "
        "means that the file name decides.",
        one_of(LOAD_FORMATS),
    )
    skip_tokenizer_init: bool = option(False, "Load no tokenizer: prompts and outputs are token ids only.", FLAG)
    seed: int = option(0, "Random seed of requests that set none, and of dummy weights.", integer(0))

    @classmethod
    def from_options(cls, model: str | None, options: Mapping[str, Any]) -> "Config":
        """Make a Config from options by name; an earlier spelling counts as the current one."""
        known = [field.name for field in fields(cls)]
        if not options.keys() <= set(known):
            from nanovllm.option_names import known_options

            options = known_options(options, known)
        return cls(model=model, **options)

    def __post_init__(self) -> None:
        check_options(self, ConfigError)
        if self.kv_cache_block_size % 16:
            refuse("kv_cache_block_size", self.kv_cache_block_size, "must be a multiple of 16", ConfigError)
        # A step must have room for one token of each running sequence: change a default that contradicts this.
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if isinstance(seqs, AdjustableInt):
            seqs = min(seqs, tokens)
        elif isinstance(tokens, AdjustableInt):
            tokens = max(tokens, seqs)
        elif tokens < seqs:
            rule = (
                f"must be at least max_num_seqs={seqs}, because a step computes one token of each running sequence; "
                "raise max_num_batched_tokens or lower max_num_seqs"
            )
            refuse("max_num_batched_tokens", tokens, rule, ConfigError)
        object.__setattr__(self, "max_num_batched_tokens", int(tokens))
        object.__setattr__(self, "max_num_seqs", int(seqs))

    def cache_layout(self, *, windows: tuple[int | None, ...], max_model_len: int) -> CacheLayout:
        """The sizes of the KV cache. `windows`: the attention window of each paged group, None for full attention."""
        return CacheLayout(
            windows=windows,
            block_size=self.kv_cache_block_size,
            max_model_len=max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_tokens=self.max_num_batched_tokens,
        )

    def scheduler_config(
        self, *, max_model_len: int, groups: tuple[BlockGroup, ...], keeps_row_state: bool = False
    ) -> SchedulerConfig:
        """The scheduler's part of the options. `keeps_row_state`: a layer keeps state outside of the blocks."""
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.kv_cache_block_size,
            groups=groups,
            enable_prefix_caching=self.enable_prefix_caching,
            keeps_row_state=keeps_row_state,
        )
