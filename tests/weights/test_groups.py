"""4- and 8-bit integers in groups: AWQ, GPTQ and compressed-tensors files against a dequantization written here."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nanovllm.checkpoint.packed.tensor import InMemory
from nanovllm.errors import CheckpointError
from nanovllm.weights.forms import GroupForm
from nanovllm.weights.groups import GroupFormat
from tests.helpers import edit_config, open_llm
from tests.weights.packed_files import PROMPTS, PackedFiles, check_greedy, check_plan, generate, write_packed

GROUP = 16
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of the eight in a word, from the lowest four bits up


class Quantized(NamedTuple):
    codes: Tensor  # [out, in], 0 to 2 ** bits - 1
    scale: Tensor  # [out, groups]
    zero: Tensor  # [out, groups]
    groups: Tensor  # [in]: the group of each column
    dense: Tensor  # [out, in]


def quantize(weight: Tensor, *, bits: int = 4, size: int = GROUP, symmetric: bool = True, ordered: bool = False,
             dtype: torch.dtype = torch.float16) -> Quantized:  # fmt: skip
    """With columns in random order if `ordered`; zeros of the whole range, 0 among them, unless `symmetric`."""
    rows, columns = weight.shape
    generator = torch.Generator().manual_seed(columns)
    groups = torch.arange(columns) // (size or columns)
    if ordered:
        groups = groups[torch.randperm(columns, generator=generator)]
    count = int(groups.max()) + 1
    scale = (torch.rand(rows, count, generator=generator) * 0.02 + 0.02).to(dtype)
    zero = torch.full((rows, count), 1 << (bits - 1))
    if not symmetric:
        zero = torch.randint(0, 1 << bits, (rows, count), generator=generator)
        zero[0, 0] = 0
    codes = torch.empty(rows, columns, dtype=torch.int64)
    dense = torch.empty(rows, columns)
    for k in range(columns):
        s, z = scale[:, groups[k]].float(), zero[:, groups[k]]
        codes[:, k] = ((weight[:, k] / s).round().long() + z).clamp(0, (1 << bits) - 1)
        dense[:, k] = (codes[:, k] - z) * s
    return Quantized(codes, scale, zero, groups.int(), dense)


def words(values: Tensor, bits: int) -> Tensor:
    """[a, n] -> int32 [a, n * bits / 32]: the first value in the lowest bits."""
    per_word = 32 // bits
    grouped = values.unflatten(1, (-1, per_word)).to(torch.int64)
    packed = sum(grouped[..., i] << (bits * i) for i in range(per_word))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def pack_gptq(weight: Tensor, *, version: int = 1, bits: int = 4, **settings: Any) -> tuple[dict[str, Tensor], Tensor]:
    q = quantize(weight, bits=bits, **settings)
    zeros = (q.zero - 1) % (1 << bits) if version == 1 else q.zero
    stored = {"qweight": words(q.codes, bits).t(), "qzeros": words(zeros.t(), bits)}
    return stored | {"scales": q.scale.t(), "g_idx": q.groups}, q.dense


def pack_awq(weight: Tensor, *, symmetric: bool = False, **settings: Any) -> tuple[dict[str, Tensor], Tensor]:
    q = quantize(weight, symmetric=symmetric, **settings)

    def order(values: Tensor) -> Tensor:
        return values.unflatten(1, (-1, 8))[..., AWQ_COLUMNS].flatten(1)

    stored = {"qweight": words(order(q.codes.t()), 4), "qzeros": words(order(q.zero.t()), 4), "scales": q.scale.t()}
    return stored, q.dense


def pack_compressed(weight: Tensor, *, bits: int = 4, symmetric: bool = True, **settings: Any) -> Any:
    """By the format's own library."""
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    q = quantize(weight, bits=bits, symmetric=symmetric, **settings)
    middle = 1 << (bits - 1)
    stored = {"weight_packed": pack_to_int32((q.codes - middle).to(torch.int8), bits), "weight_scale": q.scale}
    stored["weight_shape"] = torch.tensor(weight.shape)
    if not symmetric:
        stored["weight_zero_point"] = pack_to_int32((q.zero - middle).to(torch.int8), bits, packed_dim=0)
    if settings.get("ordered"):
        stored["weight_g_idx"] = q.groups
    return stored, q.dense


def gptq_config(**settings: Any) -> dict[str, Any]:
    base = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    return base | {"checkpoint_format": "gptq", "damp_percent": 0.1, "lm_head": False} | settings


def compressed_config(**weights: Any) -> dict[str, Any]:
    args = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP} | weights
    groups = {"group_0": {"targets": ["Linear"], "weights": args, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    return config | {"config_groups": groups}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {  # how to pack, settings, config
    "awq": (pack_awq, {}, AWQ),
    "gptq": (pack_gptq, {}, gptq_config()),
    "gptq asymmetric": (pack_gptq, {"symmetric": False}, gptq_config(sym=False)),
    "gptq 2": (pack_gptq, {"symmetric": False, "version": 2}, gptq_config(sym=False, checkpoint_format="gptq_v2")),
    "gptq ordered": (pack_gptq, {"ordered": True, "symmetric": False}, gptq_config(sym=False, desc_act=True)),
    "gptq 8": (pack_gptq, {"bits": 8, "symmetric": False}, gptq_config(bits=8, sym=False)),
    "gptq rows": (pack_gptq, {"size": 0}, gptq_config(group_size=-1)),
    "packed": (pack_compressed, {"dtype": torch.bfloat16}, compressed_config()),
    "packed asymmetric": (pack_compressed, {"symmetric": False}, compressed_config(symmetric=False)),
    "packed 8": (pack_compressed, {"bits": 8}, compressed_config(num_bits=8)),
    "packed 8 asymmetric": (
        pack_compressed,
        {"bits": 8, "symmetric": False},
        compressed_config(num_bits=8, symmetric=False),
    ),
    "packed ordered": (pack_compressed, {"ordered": True}, compressed_config(actorder="group")),
    "packed rows": (pack_compressed, {"size": 0}, compressed_config(strategy="channel", group_size=None)),
}


WITH_EXPERTS = ("awq", "gptq ordered", "packed asymmetric")


def write(case: str, folder: Path, name: str) -> PackedFiles:
    """The down projections of experts stay dense: groups do not divide their 24 columns."""
    pack, settings, config = CASES[case]

    def packed(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if module == "lm_head" or weight.shape[1] % GROUP:
            return None
        return pack(weight, **settings)

    left_out = ["experts." + str(i) + ".down_proj" for i in range(6)]
    key = "ignore" if "ignore" in config else "modules_to_not_convert"
    names = [f"re:.*{one}" if key == "ignore" else one for one in left_out]
    return write_packed(name, folder, packed, config | {key: [*config.get(key, []), *names]})


@pytest.mark.parametrize("case", CASES)
def test_layouts(tmp_path: Path, case: str) -> None:
    check_greedy(write(case, tmp_path, "qwen3-moe" if case in WITH_EXPERTS else "qwen3"))


def test_scales_may_be_negative(tmp_path: Path) -> None:
    """As those of AutoRound, which uses all of -8 to 7."""

    def packed(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if module == "lm_head":
            return None
        stored, dense = pack_gptq(-weight)
        return stored | {"scales": -stored["scales"]}, -dense

    check_greedy(write_packed("qwen3", tmp_path, packed, gptq_config()))


def test_symmetric_awq(tmp_path: Path) -> None:
    """GPTQModel's files say zero_point=False, and their zeros are all 8."""

    def packed(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        return None if module == "lm_head" else pack_awq(weight, symmetric=True)

    files = write_packed("qwen3", tmp_path, packed, AWQ | {"zero_point": False})
    check_greedy(files)
    check_plan(files)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_biases_that_the_model_does_not_have(tmp_path: Path, value: float) -> None:
    """GPTQ files may have them, of zeros; so may groups be given as zeros for columns in order."""

    def packed(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if module == "lm_head":
            return None
        stored, dense = pack_gptq(weight)
        return stored | {"bias": torch.full((weight.shape[0],), value), "g_idx": stored["g_idx"] * 0}, dense

    files = write_packed("qwen3", tmp_path, packed, gptq_config())
    if value:
        with pytest.raises(CheckpointError, match="unexpected: .*_proj.bias"):
            open_llm(files.packed)
    else:
        check_greedy(files)


@pytest.mark.parametrize("case", ["awq", "gptq ordered", "packed 8 asymmetric", "packed"])
def test_a_plan_counts_its_bytes(tmp_path: Path, case: str) -> None:
    files = write(case, tmp_path, "qwen3-moe")
    check_plan(files)
    for file in files.packed.glob("*.safetensors*"):
        file.unlink()
    edit_config(files.packed, lambda raw: raw.update(dtype="float16"))
    check_plan(files, load_format="dummy")
    assert len(generate(files.packed, load_format="dummy")) == len(PROMPTS)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [False, True])
def test_rounding_is_to_the_nearest(bits: int, zero: bool) -> None:
    form = GroupForm(bits, GROUP, zero=zero, scale_dtype="float32")
    weight = GroupFormat(form, columns=48).empty((20, 48), dtype=torch.float32, device=torch.device("cpu"))
    dense = torch.randn(20, 48, generator=torch.Generator().manual_seed(0)) + (0.5 if zero else 0.0)
    dense[3] = 0.0
    weight.load((slice(0, 20),), InMemory(dense), ())
    error = (weight.dequantized() - dense).abs().unflatten(1, (-1, GROUP))
    assert (error <= 0.5001 * weight.pieces.scale.unsqueeze(-1) * (1 + zero)).all()
    x, bias = torch.randn(3, 48), torch.randn(20)
    expected = x.double() @ weight.dequantized().double().T + bias.double()
    torch.testing.assert_close(weight.matmul(x, bias).double(), expected, atol=1e-4, rtol=1e-5)


def test_tiles_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    form = GroupForm(4, GROUP, scale_dtype="float32")
    weight = GroupFormat(form, columns=32).empty((10, 32), dtype=torch.float32, device=torch.device("cpu"))
    weight.load((slice(0, 10),), InMemory(torch.randn(10, 32)), ())
    x = torch.randn(2, 32)
    whole = weight.matmul(x)
    monkeypatch.setattr("nanovllm.weights.tiles.TILE_WEIGHTS", 100)
    torch.testing.assert_close(weight.matmul(x), whole)


# --- bad files --------------------------------------------------------------------------------------------------------


def change(**changes: Any) -> Any:
    """Replace tensors of a module: by a function of the tensor, or None to remove it."""

    def damage(tensors: dict[str, Tensor], module: str) -> None:
        for own, edit in changes.items():
            tensor = tensors.pop(f"{module}.{own}")
            if edit is not None:
                tensors[f"{module}.{own}"] = edit(tensor).contiguous()

    return damage


def unpacked(tensors: dict[str, Tensor], module: str) -> None:
    for own in ("weight_packed", "weight_scale", "weight_shape"):
        del tensors[f"{module}.{own}"]
    tensors[f"{module}.weight"] = torch.ones(80, 48)


@pytest.mark.parametrize(
    ("case", "damage", "message"),
    [
        ("gptq", change(scales=None), r"up_proj: scales is missing"),
        ("gptq", change(scales=lambda t: t[:-1]), r"scales for \[80, 2\] rows and groups, and \[80, 3\] is needed"),
        ("gptq", change(scales=lambda t: t * 0), "a scale is zero"),
        ("gptq", change(scales=lambda t: t * float("nan")), "a scale is zero, infinite or NaN"),
        ("gptq", change(scales=lambda t: t.float() * 1.0001), "its scales are torch.float32, and those of other"),
        ("gptq", change(qzeros=lambda t: t[:-1]), r"zeros for \[80, 2\] rows and groups, and \[80, 3\] is needed"),
        ("gptq", change(qzeros=lambda t: t + 1), "the weight is symmetric, and a zero is not in the middle"),
        ("gptq", change(qweight=lambda t: t[:-1]), r"has shape \[80, 40\], and the config asks for \[80, 48\]"),
        ("gptq", change(qweight=lambda t: t.to(torch.int64)), "packed numbers are torch.int64, and int32 is needed"),
        ("gptq", change(g_idx=lambda t: t.flip(0)), "g_idx is not in order"),
        ("gptq ordered", change(g_idx=None), "there is no g_idx for each of them"),
        ("gptq ordered", change(g_idx=lambda t: t + 1), "g_idx names groups outside of 0 to 2"),
        ("packed asymmetric", change(weight_zero_point=None), "weight_zero_point is missing"),
        ("packed", change(weight_packed=None, weight_scale=None, weight_shape=None), "1 missing: .*up_proj.weight"),
        ("packed", unpacked, "up_proj.weight: the config says that it has 4 bits, but the file holds it unpacked"),
    ],
)
def test_bad_files(tmp_path: Path, case: str, damage: Any, message: str) -> None:
    files = write(case, tmp_path, "qwen3")
    tensors: dict[str, Tensor] = {}
    for file in files.packed.glob("*.safetensors*"):
        tensors |= load_file(file) if file.suffix == ".safetensors" else {}
        file.unlink()
    damage(tensors, "model.layers.1.mlp.up_proj")
    save_file(tensors, files.packed / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        open_llm(files.packed)


def test_groups_that_do_not_divide_the_columns(tmp_path: Path) -> None:
    files = write("gptq", tmp_path, "qwen3")
    edit_config(files.packed, lambda raw: raw["quantization_config"].update(group_size=32))
    with pytest.raises(CheckpointError, match="groups of 32 columns with 4 bits do not divide 48 columns on 1 ranks"):
        open_llm(files.packed)
