"""Step times: computed by hand, against the roofline, and against measurements on an H200."""

import pytest

from nanovllm.bench.roofline import Machine, Roofline
from nanovllm.bench.shapes import shape_folder
from nanovllm.errors import ConfigError
from nanovllm.models.registry import describe
from nanovllm.simulate.step_time import H200, H200_OVERHEAD, Divided, Linear, Modelled, StepWork


def of_shape(name: str, machine: Machine = H200, overhead: float = H200_OVERHEAD) -> Modelled:
    model = describe(shape_folder(name)).config
    return Modelled(Roofline(machine, model, 2, "bfloat16"), overhead)


def decode(batch: int, context: int) -> StepWork:
    return StepWork(0, batch, batch, batch * context, 0)


def prefill(count: int, length: int) -> StepWork:
    return StepWork(count * length, 0, count, 0, count * length * (length + 1) // 2)


@pytest.mark.parametrize(
    ("name", "batch", "milliseconds", "tolerance"),  # docs/performance.md
    [
        ("qwen3-8b", 1, 4.04, 0.04),
        ("qwen3-8b", 8, 4.42, 0.04),
        ("qwen3-8b", 64, 6.69, 0.04),
        ("qwen3-8b", 256, 15.44, 0.04),
        ("qwen3-0.6b", 1, 0.61, 0.06),
        ("qwen3-0.6b", 8, 0.88, 0.08),
        ("qwen3-0.6b", 64, 2.45, 0.06),
        ("qwen3-0.6b", 256, 7.60, 0.06),
    ],
)
def test_decode_steps_measured_on_an_h200(name: str, batch: int, milliseconds: float, tolerance: float) -> None:
    assert of_shape(name).seconds(decode(batch, 960)) * 1e3 == pytest.approx(milliseconds, rel=tolerance)


@pytest.mark.parametrize(("name", "seconds", "tolerance"), [("qwen3-8b", 5.17, 0.03), ("qwen3-0.6b", 0.42, 0.12)])
def test_prefill_measured_on_an_h200(name: str, seconds: float, tolerance: float) -> None:
    chunk = of_shape(name).seconds(prefill(17, 960))  # a step holds 16,896 tokens, about 17 of the 256 prompts
    assert chunk * 256 / 17 == pytest.approx(seconds, rel=tolerance)


def test_without_overhead_it_is_the_roofline() -> None:
    for name in ("qwen3-8b", "qwen3-30b-a3b", "smollm2-135m"):
        modelled = of_shape(name, overhead=0.0)
        roofline = modelled.roofline
        assert modelled.seconds(decode(32, 500)) == pytest.approx(roofline.step_seconds(32, 500))
        assert modelled.seconds(prefill(3, 700)) == pytest.approx(roofline.prefill_seconds([700] * 3))


def test_given_constants() -> None:
    linear = Linear.parse("4,0.5,0.25,0.001")
    assert linear.seconds(StepWork(10, 3, 4, 1000, 99)) == pytest.approx((4 + 5 + 0.75 + 1) / 1e3)
    assert Linear.parse("4,0.5,0.25") == Linear(0.004, 0.0005, 0.00025)


def test_devices_that_share_a_step() -> None:
    linear = Linear.parse("4,0.5,0.25,0.001")
    assert Divided(linear, 4).seconds(StepWork(8, 4, 4, 400, 0)) == linear.seconds(StepWork(2, 1, 1, 100, 0))


@pytest.mark.parametrize("text", ["", "1,2", "1,2,3,4,5", "1,x,3", "1,-2,3", "0,1,1", "inf,1,1", "nan,1,1"])
def test_wrong_constants(text: str) -> None:
    with pytest.raises(ConfigError, match="step_time"):
        Linear.parse(text)
