"""The profile of a decode phase, from invented kernels: idle time, the table, the diagram."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from torch.autograd import DeviceType

import nanovllm
from nanovllm.bench.profile import COLOURS, EDGE_STEPS, Kernel, ProfileReport, Steps, _kernels, draw, middle_steps
from nanovllm.cli.main import main
from nanovllm.errors import EngineError
from nanovllm.native.build import library
from tests.helpers import model_dir

KERNELS = Path(nanovllm.__file__).parent / "kernels"
SVG = "{http://www.w3.org/2000/svg}"
STEP_US = 100.0


def one_step(begin: float) -> list[Kernel]:
    """100 µs: 1 µs idle inside the step and 9 µs at its end; two kernels overlap, and a copy covers the long gap."""
    return [
        Kernel("void cutlass::gemm<128>(Params)", begin, begin + 40),
        Kernel("_decode_kernel", begin + 41, begin + 71),
        Kernel("_rms_norm_kernel", begin + 61, begin + 81),
        Kernel("_sample_kernel", begin + 81, begin + 91),
        Kernel("Memcpy DtoH (Device -> Pinned)", begin + 90, begin + 99),
    ]


def made_up(num_steps: int) -> list[Kernel]:
    return [kernel for step in range(num_steps) for kernel in one_step(step * STEP_US)]


def test_idle_time_is_what_no_kernel_covers() -> None:
    steps = Steps(made_up(10), 10)
    gaps = steps.gaps()
    assert sorted(gaps) == pytest.approx([1.0] * 10 + [9.0] * 9)
    assert steps.microseconds == pytest.approx(999.0)
    row = steps.row()
    assert row["idle_percent"] == pytest.approx(100 * 91 / 999)
    assert row["long_gaps_percent"] == pytest.approx(100 * 81 / 999)
    assert (row["kernels_per_step"], row["copies_per_step"]) == (4.0, 1.0)
    assert row["step_ms"] == pytest.approx(0.0999)


def test_a_gpu_that_is_never_idle() -> None:
    busy = Steps([Kernel("a", 0, 60), Kernel("b", 10, 20), Kernel("a", 60, 100)], 1)
    assert busy.gaps() == []
    assert busy.row()["idle_percent"] == 0


def test_first_and_last_steps_are_cut_off() -> None:
    recorded = made_up(10)
    slow_start = [Kernel(k.name, k.start - 5000, k.end - 5000) for k in recorded[:5]] + recorded[5:]
    steps = middle_steps(reversed(slow_start), 10)
    assert steps == Steps(recorded[5 * EDGE_STEPS : -5 * EDGE_STEPS], 10 - 2 * EDGE_STEPS)


OURS = {
    "attention": [
        "_decode_kernel",
        "_decode_tables_kernel",
        *("_latent_decode_hopper_kernel", "_latent_decode_kernel", "_latent_merge_kernel", "_latent_store_kernel"),
        "_long_prefill_kernel",
        "_plan_kernel",
        "_prefill_kernel",
        "_small_batch_attention_kernel",
    ],
    "linear": [
        "_absorb_kernel",
        *("_dequantize_kernel", "_down_row_kernel", "_experts_kernel", "_few_rows_kernel", "_fp8_kernel"),
        *("_fp8_experts_kernel", "_fp8_many_rows_kernel", "_fp8_some_rows_kernel"),
        *("_gate_up_row_kernel", "_many_rows_kernel", "_matmul_kernel", "_one_row_kernel"),
        *("_packed_at_once_kernel", "_packed_dequantize_kernel", "_packed_expert_rows_kernel"),
        *("_packed_experts_kernel", "_packed_layer_kernel", "_packed_rows_kernel", "_packed_tiled_kernel"),
        *("_packed_wide_experts_kernel", "_packed_wide_kernel", "_project_kernel", "_route_rows_kernel"),
        "_route_tokens_kernel",
        "_tiled_kernel",
    ],
    "delta net, convolution": [
        *("_chunk_factors_kernel", "_chunk_states_kernel", "_conv_steps_kernel", "_conv_tokens_kernel"),
        *("_norm_heads_kernel", "_recurrent_kernel"),
    ],
    "sampling": ["_cut_kernel", "_sample_kernel"],
    "norm, rotation, activation": [
        *(
            "_embed_kernel",
            "_gather_kernel",
            "_group_kernel",
            "_norm_and_round_kernel",
            "_rms_norm_kernel",
            "_rope_store_kernel",
            "_round_inputs_kernel",
            "_round_slots_kernel",
        ),
        *("_route_blocks_kernel", "_route_groups_kernel", "_route_kernel", "_scatter_kernel", "_silu_and_mul_kernel"),
        "_sum_kernel",
    ],
}


def test_every_kernel_of_ours_has_its_kind() -> None:
    assert {kind: [name for name in names if Kernel(name, 0, 1).kind == kind] for kind, names in OURS.items()} == OURS
    found = [
        name for path in KERNELS.rglob("*.py") for name in re.findall(r"^def (_\w+_kernel)\(", path.read_text(), re.M)
    ]
    assert sorted(found) == sorted(sum(OURS.values(), []))


def test_kernels_by_time() -> None:
    rows = Steps(made_up(10), 10).kernel_rows()
    assert [row["kind"] for row in rows] == ["linear", "attention", "norm, rotation, activation", "sampling", "copy"]
    assert rows[0]["kernel"] == "cutlass::gemm<128>(Params)"
    assert (rows[0]["microseconds"], rows[0]["launches"], rows[0]["each"]) == pytest.approx((40.0, 1.0, 40.0))
    many = Steps([Kernel(f"kernel_{number}" + "x" * 99, number, number + 1) for number in range(20)], 2)
    assert len(many.kernel_rows()) == 12
    assert {len(row["kernel"]) for row in many.kernel_rows()} == {60}


def test_report_has_a_table_for_each_batch() -> None:
    steps = Steps(made_up(10), 10)
    rows = [{"batch_size": size, **steps.row()} for size in (16, 64)]
    text = str(ProfileReport("profile", {"model": "tiny"}, {}, rows, {"batch 16": steps.kernel_rows()}))
    assert "batch size  step ms  idle percent" in text
    assert "\n\nbatch 16\nkind" in text
    assert text.splitlines()[-1].endswith("Memcpy DtoH (Device -> Pinned)")


def test_picture() -> None:
    picture = draw({16: Steps(made_up(10), 10), 256: Steps(made_up(4), 4)})
    root = ElementTree.fromstring(picture)
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    assert texts[0] == "batch 16: 9.1 % idle over 10 steps"
    assert texts[2] == "199 µs, 2 steps"
    assert [text for text in texts if text in COLOURS] == list(COLOURS)
    paths = list(root.iter(f"{SVG}path"))
    assert len(paths) == 2 * len({kernel.kind for kernel in made_up(4)})  # every kind of kernel, in both lanes
    assert all(path.get("d", "").count("M") == 2 for path in paths)  # two steps
    gemm = next(path for path in paths if path.get("fill") == COLOURS["linear"])
    width = (960 - 2 * 16) * 40 / 199
    assert gemm.get("d", "").startswith(f"M16.00 38h{width:.2f}v44h-{width:.2f}z")
    assert len(picture) < 5000


@dataclass
class Event:
    name: str
    device_type: DeviceType
    is_user_annotation: bool = False
    time_range: object = None

    def __post_init__(self) -> None:
        self.time_range = SimpleNamespace(start=1.0, end=2.0)


def test_kernels_are_the_device_events_that_compute() -> None:
    events = [
        Event("cudaGraphLaunch", DeviceType.CPU),
        Event("_decode_kernel", DeviceType.CUDA),
        Event("ProfilerStep", DeviceType.CUDA, is_user_annotation=True),
        Event("Event Sync", DeviceType.CUDA),
    ]
    assert _kernels(events) == [Kernel("_decode_kernel", 1.0, 2.0)]
    with pytest.raises(EngineError, match="recorded no kernel"):
        _kernels(events[:1])


@pytest.mark.skipif(library() is None, reason="there is no native library on this machine")
@pytest.mark.parametrize(("family", "has_states"), [("llama", False), ("lfm2", True)])
def test_parts_of_the_native_step(family: str, has_states: bool, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch-sizes", "1,2", "--input-len", "6", "--steps", "3", "--num-kv-cache-blocks", "16"]
    assert main(["bench", "profile", "--model", str(model_dir(family)), "--device", "cpu", *options, "--json"]) == 0
    for size, row in enumerate(json.loads(capsys.readouterr().out)["results"], 1):
        shares = [value for name, value in row.items() if name.endswith("_percent")]
        assert row["batch_size"] == size and row["attention_percent"] > 0 and "routing_percent" not in row
        assert all((f"{part}_percent" in row) == has_states for part in ("inputs of states", "states"))
        assert sum(shares) == pytest.approx(100)


def test_only_kernels_of_a_gpu_are_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "profile", "--device", "cpu", "--svg", str(tmp_path / "steps.svg")]) == 2
    assert "--svg draws the kernels of a GPU" in capsys.readouterr().err
