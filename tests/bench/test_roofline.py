"""The roofline: the published numbers of the H200, each term computed by hand, and a measured machine."""

from dataclasses import replace

import pytest
import torch

from nanovllm.bench.roofline import Machine, Roofline, kv_dtype, measure
from nanovllm.bench.shapes import shape_folder
from nanovllm.bench.workload import make_workload
from nanovllm.layers.moe_spec import MoeSpec
from nanovllm.models.changes import with_experts
from nanovllm.models.parameters import num_parameters
from nanovllm.models.registry import describe
from nanovllm.models.spec import ModelSpec, llama_shaped
from nanovllm.weights.formats import weight_formats

H200 = Machine(bytes_per_second=4.28e12, flops_per_second=796e12)
ENDLESS = 1e30  # so fast that it is never the limit

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
TINY = llama_shaped(RAW)
Q_SIZE = 4 * 4
HEAD = 50 * 8
LAYERS = num_parameters(TINY) - HEAD
KV_TOKEN = 2 * 2 * 4 * 2  # bytes of one token's keys and values in one layer: both, heads, head_dim, bfloat16


def of_shape(name: str, cache: str = "auto") -> Roofline:
    model = describe(shape_folder(name)).config
    return Roofline(H200, model, 2, kv_dtype(cache, "bfloat16"))


def of_tiny(model: ModelSpec = TINY, *, bandwidth: float = ENDLESS, flops: float = ENDLESS) -> Roofline:
    return Roofline(Machine(bandwidth, flops), model, 2, "bfloat16")


@pytest.mark.parametrize(
    ("name", "cache", "tokens_per_second"),
    [
        ("qwen3-0.6b", "auto", 35_600),
        ("qwen3-0.6b", "fp8", 62_000),
        ("qwen3-8b", "auto", 12_500),
        ("qwen3-14b", "auto", 8_000),
    ],
)
def test_published_workload_on_an_h200(name: str, cache: str, tokens_per_second: float) -> None:
    workload = make_workload()
    seconds = of_shape(name, cache).workload_seconds(workload.input_lens, workload.output_lens)
    assert workload.num_output_tokens / seconds == pytest.approx(tokens_per_second, rel=0.03)


@pytest.mark.parametrize(
    ("name", "milliseconds"), [("qwen3-0.6b", [0.31, 0.50, 2.06, 7.45]), ("qwen3-8b", [3.56, 3.8, 5.9, 14.0])]
)
def test_decode_steps_on_an_h200(name: str, milliseconds: list[float]) -> None:
    roofline = of_shape(name)
    found = [roofline.step_seconds(batch_size, 1024) * 1e3 for batch_size in (1, 8, 64, 256)]
    assert found == pytest.approx(milliseconds, rel=0.03)


def test_decode_step_reads_the_weights_once_and_every_sequence() -> None:
    weights = 2 * (LAYERS + HEAD)
    roofline = of_tiny(bandwidth=1.0)
    assert roofline.step_seconds(1, 10) == weights + 2 * 10 * KV_TOKEN
    assert roofline.step_seconds(3, 10) == weights + 3 * 2 * 10 * KV_TOKEN


def test_states_per_sequence_are_read_and_written() -> None:
    model = describe(shape_folder("lfm2-1.2b")).config
    conv, attention = model.layers[0], model.layers[2]
    roofline = of_tiny(replace(model, layers=(conv, attention)), bandwidth=1.0)
    two_more = roofline.step_seconds(3, 10) - roofline.step_seconds(1, 10)
    assert two_more == pytest.approx(2 * (2 * 2 * 2048 * 4 + 10 * 2 * 8 * 64 * 2), abs=256)


def test_large_batch_is_bound_by_arithmetic() -> None:
    assert of_tiny(flops=1.0).step_seconds(7, 10) == pytest.approx(2 * 7 * (LAYERS + HEAD))


def test_embedding_counts_only_as_a_tied_head() -> None:
    untied = of_tiny(replace(TINY, tie_word_embeddings=False), bandwidth=1.0)
    assert untied.step_seconds(1, 10) == of_tiny(bandwidth=1.0).step_seconds(1, 10)


def test_prefill_multiplies_every_token_and_samples_one_a_request() -> None:
    scores = 2 * ((1 + 2 + 3) + (1 + 2))  # two layers; prompts of 3 and of 2 tokens
    linears = 2 * 5 * LAYERS + 2 * 2 * HEAD
    assert of_tiny(flops=1.0).prefill_seconds([3, 2]) == linears + 4 * Q_SIZE * scores


def test_workload_is_its_prefill_and_its_steps() -> None:
    """Requests of 3 + 3 and 2 + 2 tokens: one decode step with both, one with the first."""
    roofline = of_tiny(bandwidth=1.0)
    reads = 2 * 2 * (LAYERS + HEAD) + 2 * (4 + 5 + 3) * KV_TOKEN
    assert roofline.workload_seconds([3, 2], [3, 2]) == roofline.prefill_seconds([3, 2]) + reads
    assert roofline.workload_seconds([3, 2], [1, 1]) == roofline.prefill_seconds([3, 2])


def test_window_limits_what_is_read() -> None:
    windowed = of_tiny(llama_shaped(RAW, windows=(None, 4)), bandwidth=1.0)
    whole = of_tiny(bandwidth=1.0)
    assert whole.step_seconds(1, 10) - windowed.step_seconds(1, 10) == (10 - 4) * KV_TOKEN
    assert whole.step_seconds(1, 4) == windowed.step_seconds(1, 4)
    saved = whole.workload_seconds([2], [6]) - windowed.workload_seconds([2], [6])
    assert saved == (1 + 2 + 3) * KV_TOKEN  # contexts 3 to 7


def test_experts_are_read_as_far_as_the_batch_touches_them() -> None:
    moe = MoeSpec(hidden_size=8, num_experts=8, num_experts_per_token=2, intermediate_size=6, norm_topk_prob=True)
    model = with_experts(llama_shaped(RAW), {0: moe, 1: moe})
    expert = 2 * 3 * 8 * 6  # weights, in both layers
    others = num_parameters(model) - 8 * expert
    reading, computing = of_tiny(model, bandwidth=1.0), of_tiny(model, flops=1.0)
    kv = 2 * 10 * KV_TOKEN
    assert reading.step_seconds(1, 10) == pytest.approx(2 * (others + 2 * expert) + kv)
    assert reading.step_seconds(1000, 10) == pytest.approx(2 * (others + 8 * expert) + 1000 * kv)
    assert computing.step_seconds(1000, 10) == pytest.approx(2 * 1000 * (others + 2 * expert))


@pytest.mark.parametrize(
    ("cache", "expected"), [("auto", 8), ("bfloat16", 8), ("float32", 16), ("fp8", 6), ("fp8_e4m3", 6)]
)
def test_bytes_of_the_cache(cache: str, expected: int) -> None:
    """Of one token's key, or value, in one head: two layers with two KV heads have eight of them."""
    assert sum(group.num_bytes for group in TINY.state_groups(kv_dtype(cache, "bfloat16"))) == 8 * expected


def test_packed_weights_are_read_as_they_are_stored() -> None:
    formats = weight_formats("int8")
    packed = replace(
        of_tiny(bandwidth=1.0),
        packed_bytes=lambda prefix, weight: formats.of(prefix, weight).num_bytes(weight.shard_shape(0, 1), 2),
    )
    matrices = [weight for layer in TINY.layers for _, weight in layer.weights() if weight.packable]
    rows = sum(weight.shard_shape(0, 1)[0] for weight in matrices)
    saved = sum(weight.num_parameters for weight in matrices) - 4 * rows
    assert of_tiny(bandwidth=1.0).step_seconds(1, 10) - packed.step_seconds(1, 10) == saved


def test_measured_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nanovllm.bench.roofline.CPU_COPY_BYTES", 1 << 24)
    monkeypatch.setattr("nanovllm.bench.roofline.CPU_MATMUL_SIZE", 128)
    machine = measure(torch.device("cpu"), torch.float32)
    assert 1e8 < machine.bytes_per_second < 1e13
    assert 1e7 < machine.flops_per_second < 1e15
    assert machine.row()["copy_gigabytes_per_second"] == machine.bytes_per_second / 1e9


def test_layers_that_share_a_cache_read_it_and_only_rows_of_the_second_embedding_are_read() -> None:
    """Gemma 4 E4B: 42 layers, seven of them of full attention, and 24 with a cache of their own."""
    model = describe(shape_folder("gemma-4-e4b")).config
    windowed, full = 2 * 2 * 256 * 2, 2 * 2 * 512 * 2  # bytes of one token in one layer
    reading = of_tiny(model, bandwidth=1.0)
    embedding, table = 262144 * 2560, 262144 * 42 * 256
    weights = 2 * (num_parameters(model) - table)  # those of the embedding are read as the head
    assert reading.step_seconds(1, 600) == weights + 600 * 7 * full + 512 * 35 * windowed
    assert reading.head_seconds(1) == 2 * embedding
    assert sum(group.num_bytes for group in model.state_groups("bfloat16")) == 4 * full + 20 * windowed
