"""Every option of the engine: flat and frozen as users write it, checked here, handed on in small parts."""

import difflib
from dataclasses import dataclass, fields
from typing import Any

from nanovllm.errors import ConfigError

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
KV_CACHE_DTYPES = (*DTYPES, "fp8")
ATTENTION_BACKENDS = ("auto", "sdpa", "triton")
DISTRIBUTED_EXECUTOR_BACKENDS = ("mp", "ray")
LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """What the control plane needs to know; plain numbers."""

    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    block_size: int
    num_blocks: int
    enable_prefix_caching: bool


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a user may set. `Config.from_options` refuses unknown names and points at the nearest known one."""

    model: str | None = None  # folder, .gguf file or hub id; None = the default model
    tokenizer: str | None = None  # another folder to take the tokenizer from
    # limits
    # tokens computed in one step, prefill and decode together; by default as many as fill all places of a GPU's tiles:
    # 128 rows on each of an H200's 132 multiprocessors
    max_num_batched_tokens: int = 16896
    max_num_seqs: int = 512  # sequences running at once
    max_model_len: int = 4096  # lowered to the model's own limit
    # memory
    gpu_memory_utilization: float = 0.9  # share of the whole GPU that this process may fill
    cpu_memory_utilization: float = 0.25  # share of the memory now free that the KV cache may take on a CPU
    kv_cache_memory_bytes: int | None = None  # exact; overrides both shares
    num_kvcache_blocks: int = -1  # exact; overrides all of the above
    kvcache_block_size: int = 32  # tokens; a multiple of 16
    enable_prefix_caching: bool = True  # keep the KV of past prompts and find it again
    # device
    device: str = "auto"  # cpu, cuda; auto = cuda where there is one
    dtype: str = "auto"  # float32, bfloat16, float16; auto = the checkpoint's, or what the CPU can compute in
    kv_cache_dtype: str = "auto"  # float32, bfloat16, float16, fp8 (half the memory, on a GPU); auto = as computed
    attention_backend: str = "auto"  # sdpa (torch alone), triton (our kernels, on a GPU); auto = triton where it runs
    enforce_eager: bool = False  # on a GPU: launch every kernel of a decode step instead of a recorded graph
    deterministic: bool = False  # on a GPU: the same request gives the same bits in any batch; slower
    overlap: bool | None = None  # schedule one step ahead; None = on a GPU, where the step runs beside the CPU
    # several devices
    tensor_parallel_size: int = 1  # devices that share each layer
    pipeline_parallel_size: int = 1  # groups of such devices, each with some of the layers
    distributed_executor_backend: str | None = None  # mp (processes of this host), ray; None = mp for several devices
    worker_timeout: float = 60.0  # seconds that a step may take before its worker counts as hung
    # loading
    load_format: str = "auto"  # safetensors, gguf, dummy (random weights); auto = by the file's name
    skip_tokenizer_init: bool = False  # token ids in and out only
    seed: int = 0  # of requests that name none, and of dummy weights

    @classmethod
    def from_options(cls, model: str | None, options: dict[str, Any]) -> "Config":
        known = [field.name for field in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; known options: {', '.join(known)}"
                raise ConfigError(f"unknown option {name!r}{hint}")
        return cls(model=model, **options)

    def __post_init__(self) -> None:
        for name in ("model", "tokenizer"):
            if getattr(self, name) is not None:
                self._check_type(name, str)
        for name in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "kvcache_block_size"):
            self._check_int(name, 1)
        for name in ("gpu_memory_utilization", "cpu_memory_utilization"):
            self._check_share(name)
        for name in ("enable_prefix_caching", "enforce_eager", "deterministic", "skip_tokenizer_init"):
            self._check_type(name, bool)
        if self.overlap is not None:
            self._check_type("overlap", bool)
        self._check_choice("device", DEVICES)
        self._check_choice("dtype", DTYPES)
        self._check_choice("kv_cache_dtype", KV_CACHE_DTYPES)
        self._check_choice("attention_backend", ATTENTION_BACKENDS)
        self._check_choice("load_format", LOAD_FORMATS)
        self._check_int("seed", 0)
        self._check_parallel()
        self._check_sizes()

    def _check_parallel(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            self._check_int(name, 1)
        if self.distributed_executor_backend is not None:
            self._check_choice("distributed_executor_backend", DISTRIBUTED_EXECUTOR_BACKENDS)
        timeout = self.worker_timeout
        if not isinstance(timeout, int | float) or isinstance(timeout, bool) or not 0 < timeout < float("inf"):
            self._refuse("worker_timeout", "must be a number of seconds above 0")

    def _check_sizes(self) -> None:
        if self.kvcache_block_size % 16:
            self._refuse("kvcache_block_size", "must be a multiple of 16")
        if self.num_kvcache_blocks != -1:
            self._check_int("num_kvcache_blocks", 1)
        if self.kv_cache_memory_bytes is not None:
            self._check_int("kv_cache_memory_bytes", 1)
        if self.max_num_batched_tokens < self.max_num_seqs:
            self._refuse(
                "max_num_batched_tokens",
                f"must be at least max_num_seqs={self.max_num_seqs}, or not every running sequence could decode in a "
                "step; raise the one or lower the other",
            )

    def _refuse(self, name: str, rule: str) -> None:
        raise ConfigError(f"{name}={getattr(self, name)!r}: {rule}")

    def _check_type(self, name: str, kind: type) -> None:
        if not isinstance(getattr(self, name), kind):
            self._refuse(name, f"must be {kind.__name__}")

    def _check_int(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            self._refuse(name, f"must be an integer of at least {low}")

    def _check_share(self, name: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= 1:
            self._refuse(name, "must be a number in (0, 1]")

    def _check_choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value in choices:
            return
        near = difflib.get_close_matches(str(value), choices, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        self._refuse(name, f"must be one of {', '.join(choices)}{hint}")

    def scheduler_config(self, *, max_model_len: int, num_blocks: int) -> SchedulerConfig:
        return SchedulerConfig(
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_num_seqs=self.max_num_seqs,
            max_model_len=max_model_len,
            block_size=self.kvcache_block_size,
            num_blocks=num_blocks,
            enable_prefix_caching=self.enable_prefix_caching,
        )
