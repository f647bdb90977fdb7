"""Config: refused values with their messages, accepted limits, the nearest known name for an unknown option."""

import itertools
import math
from dataclasses import FrozenInstanceError, fields, replace
from typing import Any

import pytest

from nanovllm.config import (
    ATTENTION_BACKENDS,
    DEVICES,
    DTYPES,
    LOAD_FORMATS,
    Config,
    SchedulerConfig,
)
from nanovllm.errors import ConfigError, NanoError
from nanovllm.option_names import OPTION_ALIASES
from nanovllm.state import BlockGroup

NAN, INF = math.nan, math.inf

REFUSED: list[tuple[str, Any, str]] = [
    ("max_num_batched_tokens", 0, "integer of at least 1"),
    ("max_num_batched_tokens", 1.5, "integer"),
    ("max_num_batched_tokens", True, "integer"),
    ("max_num_batched_tokens", "64", "integer"),
    ("max_num_seqs", 0, "integer of at least 1"),
    ("max_num_seqs", -1, "integer of at least 1"),
    ("max_num_seqs", None, "integer"),
    ("model", 5, "must be str"),
    ("tokenizer", 5, "must be str"),
    ("target_itl_ms", -1, "finite number in [0, inf)"),
    ("target_itl_ms", INF, "finite number in [0, inf)"),
    ("target_itl_ms", "25ms", "finite number in [0, inf)"),
    ("max_model_len", 0, "integer of at least 1"),
    ("max_model_len", 4096.0, "integer"),
    ("kv_cache_block_size", 0, "integer of at least 1"),
    ("kv_cache_block_size", 8, "multiple of 16"),
    ("kv_cache_block_size", 100, "multiple of 16"),
    ("kv_cache_block_size", 16.0, "integer"),
    ("num_kv_cache_blocks", 0, "integer of at least 1"),
    ("num_kv_cache_blocks", -2, "integer of at least 1"),
    ("num_kv_cache_blocks", 1.5, "integer"),
    ("num_kv_cache_blocks", None, "integer"),
    ("kv_cache_memory_bytes", 0, "integer of at least 1"),
    ("kv_cache_memory_bytes", -1, "integer of at least 1"),
    ("kv_cache_memory_bytes", 1e9, "integer"),
    ("kv_cache_memory_bytes", "1G", "integer"),
    ("gpu_memory_utilization", 0, "number in (0, 1]"),
    ("gpu_memory_utilization", 1.01, "number in (0, 1]"),
    ("gpu_memory_utilization", -0.5, "number in (0, 1]"),
    ("gpu_memory_utilization", NAN, "number in (0, 1]"),
    ("gpu_memory_utilization", INF, "number in (0, 1]"),
    ("gpu_memory_utilization", "90%", "number in (0, 1]"),
    ("gpu_memory_utilization", True, "number in (0, 1]"),
    ("cpu_memory_utilization", 0.0, "number in (0, 1]"),
    ("cpu_memory_utilization", NAN, "number in (0, 1]"),
    ("cpu_memory_utilization", None, "number in (0, 1]"),
    ("enable_prefix_caching", 1, "must be bool"),
    ("enable_prefix_caching", None, "must be bool"),
    ("enforce_eager", "no", "must be bool"),
    ("deterministic", 1, "must be bool"),
    ("skip_tokenizer_init", 0, "must be bool"),
    ("overlap", 1, "must be bool"),
    ("overlap", "auto", "must be bool"),
    ("device", "gpu", "one of auto, cpu, cuda"),
    ("device", "cdua", "did you mean 'cuda'?"),
    ("device", None, "one of auto, cpu, cuda"),
    ("dtype", "bf16", "one of auto, float32, bfloat16, float16"),
    ("dtype", "floaat16", "did you mean 'float16'?"),
    ("dtype", 32, "one of auto, float32, bfloat16, float16"),
    ("kv_cache_dtype", "int4", "one of auto, float32, bfloat16, float16, fp8"),
    ("attention_backend", "flash", "one of auto, sdpa, triton"),
    ("attention_backend", "spda", "did you mean 'sdpa'?"),
    ("cpu_kernels", "c", "one of auto, native, torch"),
    ("load_format", "pickle", "one of auto, safetensors, gguf, dummy"),
    ("load_format", "safetensor", "did you mean 'safetensors'?"),
    ("quantization", "int3", "must be None"),
    ("quantization", 8, "must be None"),
    ("seed", -1, "integer of at least 0"),
    ("seed", 0.5, "integer"),
    ("seed", None, "integer"),
    ("tensor_parallel_size", 0, "integer of at least 1"),
    ("tensor_parallel_size", 2.0, "integer"),
    ("pipeline_parallel_size", -1, "integer of at least 1"),
    ("pipeline_parallel_size", True, "integer"),
    ("distributed_executor_backend", "uni", "one of mp, ray"),
    ("distributed_executor_backend", "rey", "did you mean 'ray'?"),
    ("worker_timeout", 0, "number of seconds above 0"),
    ("worker_timeout", INF, "number of seconds above 0"),
    ("worker_timeout", NAN, "number of seconds above 0"),
    ("worker_timeout", "1m", "number of seconds above 0"),
]


@pytest.mark.parametrize("option, value, rule", REFUSED)
def test_refused_naming_option_value_and_rule(option: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config(**{option: value})
    message = str(error.value)
    assert message.startswith(f"{option}={value!r}: "), message
    assert rule in message


def test_a_refusal_is_a_value_error_of_ours() -> None:
    assert issubclass(ConfigError, ValueError) and issubclass(ConfigError, NanoError)


def test_every_option_has_a_refused_value() -> None:
    assert {option for option, _, _ in REFUSED} == {field.name for field in fields(Config)}


ACCEPTED: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 512},
    {"max_num_batched_tokens": 1, "max_num_seqs": 1},
    {"max_model_len": 1},
    {"kv_cache_block_size": 16},
    {"kv_cache_block_size": 48},
    {"num_kv_cache_blocks": -1},
    {"num_kv_cache_blocks": 1},
    {"kv_cache_memory_bytes": 1},
    {"gpu_memory_utilization": 1},
    {"gpu_memory_utilization": 1e-6},
    {"cpu_memory_utilization": 1.0},
    {"overlap": None},
    {"overlap": False},
    {"seed": 0},
    {"seed": 2**63},
    {"tensor_parallel_size": 1},
    {"tensor_parallel_size": 8, "pipeline_parallel_size": 3},
    {"distributed_executor_backend": None},
    {"distributed_executor_backend": "mp", "worker_timeout": 1},
    {"tokenizer": "elsewhere"},
]


@pytest.mark.parametrize("options", ACCEPTED, ids=str)
def test_accepted_at_the_edge(options: dict[str, Any]) -> None:
    config = Config.from_options("model", options)
    assert config.model == "model"
    assert all(getattr(config, option) == value for option, value in options.items())


def test_choices_go_together_freely() -> None:
    names = ("device", "dtype", "kv_cache_dtype", "attention_backend", "load_format", "overlap", "enforce_eager")
    choices = (DEVICES, DTYPES, DTYPES, ATTENTION_BACKENDS, LOAD_FORMATS, (None, False, True), (False, True))
    for values in itertools.product(*choices):
        options = dict(zip(names, values, strict=True))
        config = Config(**options)
        assert {name: getattr(config, name) for name in names} == options


def test_the_defaults_users_rely_on() -> None:
    config = Config()
    assert config.model is None
    assert (config.max_num_batched_tokens, config.max_num_seqs, config.max_model_len) == (16896, 1024, 4096)
    assert (config.gpu_memory_utilization, config.num_kv_cache_blocks) == (0.9, -1)
    assert (config.tensor_parallel_size, config.enforce_eager, config.seed) == (1, False, 0)
    assert (config.device, config.dtype, config.attention_backend, config.load_format) == ("auto",) * 4


@pytest.mark.parametrize(
    "given, effective",
    [
        ({}, (16896, 1024)),
        ({"max_num_batched_tokens": 37}, (37, 37)),
        ({"max_num_batched_tokens": 511}, (511, 511)),
        ({"max_num_batched_tokens": 20000}, (20000, 1024)),
        ({"max_num_seqs": 20000}, (20000, 20000)),
        ({"max_num_seqs": 37}, (16896, 37)),
        ({"max_num_batched_tokens": 37, "max_num_seqs": 37}, (37, 37)),
    ],
)
def test_a_default_gives_way_to_what_the_user_set(given: dict[str, int], effective: tuple[int, int]) -> None:
    config = Config.from_options(None, given)
    limits = (config.max_num_batched_tokens, config.max_num_seqs)
    assert limits == effective
    assert [type(limit) for limit in limits] == [int, int]
    assert Config(**given) == config == replace(config)


@pytest.mark.parametrize("tokens, seqs", [(37, 512), (511, 512), (16896, 20000), (1, 2)])
def test_limits_that_the_user_set_and_that_contradict_are_refused(tokens: int, seqs: int) -> None:
    with pytest.raises(ConfigError) as error:
        Config(max_num_batched_tokens=tokens, max_num_seqs=seqs)
    assert str(error.value).startswith(f"max_num_batched_tokens={tokens}: must be at least max_num_seqs={seqs}, ")


@pytest.mark.parametrize(
    "name, near",
    [
        ("max_num_seq", "max_num_seqs"),
        ("max_model_length", "max_model_len"),
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("enforce_eagr", "enforce_eager"),
        ("kv_cache_blocksize", "kv_cache_block_size"),
        ("kvcache_blocksize", "kv_cache_block_size"),
        ("Seed", "seed"),
    ],
)
def test_an_unknown_option_points_at_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_options(None, {"seed": 1, name: 1})
    assert str(error.value) == f"unknown option {name!r}; did you mean {near!r}?"


def test_an_unknown_option_like_no_other_gets_the_list() -> None:
    with pytest.raises(ConfigError) as error:
        Config.from_options(None, {"xyzzy": 1})
    assert str(error.value).startswith("unknown option 'xyzzy'; known options: model, tokenizer, ")
    assert all(field.name in str(error.value) for field in fields(Config))


@pytest.mark.parametrize("old, new", OPTION_ALIASES.items())
def test_an_earlier_spelling_counts_as_the_current_one(old: str, new: str) -> None:
    assert Config.from_options(None, {old: 48}) == Config.from_options(None, {new: 48}) == Config(**{new: 48})
    assert Config.from_options(None, {old: 48, new: 48}) == Config(**{new: 48})
    with pytest.raises(ConfigError) as error:
        Config.from_options(None, {old: -7})
    assert str(error.value).startswith(f"{new}=-7: ")


@pytest.mark.parametrize("old, new", OPTION_ALIASES.items())
def test_two_spellings_with_different_values_are_refused(old: str, new: str) -> None:
    for options in ({old: 16, new: 32}, {new: 32, old: 16}):
        with pytest.raises(ConfigError) as error:
            Config.from_options(None, options)
        both = " and ".join(f"{name}={value}" for name, value in options.items())
        assert str(error.value) == f"{both}: two spellings of one option with different values; give {new} only"


def test_aliases_are_of_options_that_exist() -> None:
    names = {field.name for field in fields(Config)}
    assert set(OPTION_ALIASES.values()) <= names
    assert not OPTION_ALIASES.keys() & names


def test_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().seed = 1


def test_the_control_plane_gets_plain_numbers() -> None:
    config = Config(max_num_batched_tokens=100, max_num_seqs=7, kv_cache_block_size=32, enable_prefix_caching=False)
    assert config.scheduler_config(max_model_len=50, groups=(BlockGroup(9),)) == SchedulerConfig(
        max_num_batched_tokens=100,
        max_num_seqs=7,
        max_model_len=50,
        block_size=32,
        groups=(BlockGroup(9),),
        enable_prefix_caching=False,
    )
