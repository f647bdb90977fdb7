"""GGUF: header, weights, config and the default model, against the gguf package and transformers."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanovllm.checkpoint import gguf as ours
from nanovllm.checkpoint import gguf_header
from nanovllm.checkpoint.gguf import GGUFFile
from nanovllm.checkpoint.gguf_tokenizer import build_tokenizer, chat_template, special_tokens
from nanovllm.errors import CheckpointError
from tests.checkpoint.gguf_files import (
    EXPERT_FFN,
    EXPERTS,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    LAYERS,
    VOCAB,
    finish,
    model_tensors,
    model_writer,
    random_blocks,
    read,
    write_model,
)

REPOSITORY = Path(__file__).parents[2]


# ---- the header ----


def test_metadata_of_every_kind_equals_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "kinds.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("k.u8", 255)
    writer.add_int8("k.i8", -128)
    writer.add_uint16("k.u16", 65535)
    writer.add_int16("k.i16", -32768)
    writer.add_uint32("k.u32", 2**32 - 1)
    writer.add_int32("k.i32", -(2**31))
    writer.add_uint64("k.u64", 2**64 - 1)
    writer.add_int64("k.i64", -(2**63))
    writer.add_float32("k.f32", 0.1)
    writer.add_float64("k.f64", 0.1)
    writer.add_bool("k.yes", True)
    writer.add_bool("k.no", False)
    writer.add_string("k.text", "tëxt 文 🎉")
    writer.add_array("k.strings", ["", "a", "é", "日本"])
    writer.add_array("k.ints", [1, -2, 3])
    writer.add_array("k.floats", [0.5, 1.5])
    writer.add_array("k.bools", [True, False])
    writer.add_array("k.nested", [[1, 2], [3]])
    writer.add_tensor("token_embd.weight", np.ones((3, 5), np.float32))
    writer.add_tensor("rope_freqs.weight", np.ones(7, np.float16))
    finish(writer)
    reader = gguf.GGUFReader(path)
    with GGUFFile(path) as file:
        assert file.path == path
        expected = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
        del expected["k.nested"]  # the package flattens it
        assert file.metadata.pop("k.nested") == [[1, 2], [3]]
        assert file.metadata == expected
        assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
        for tensor in reader.tensors:
            info = file.tensors[tensor.name]
            assert info.shape == tuple(reversed(tensor.shape.tolist()))
            assert info.type_name == tensor.tensor_type.name
            assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)


def test_types_and_their_sizes_equal_the_gguf_package() -> None:
    for number, (name, block, size) in gguf_header._TENSOR_TYPES.items():
        assert GGMLQuantizationType(number).name == name
        assert gguf.GGML_QUANT_SIZES[GGMLQuantizationType(number)] == (block, size)


def test_reading_the_config_loads_no_torch(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "qwen3")
    program = (
        "import sys\nfrom nanovllm.checkpoint.gguf import GGUFFile\nwith GGUFFile(sys.argv[1]) as f: f.hf_config()\n"
        "sys.exit(', '.join({'torch', 'numpy', 'gguf', 'tokenizers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "m.gguf"], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


# ---- the weights ----


@pytest.mark.parametrize("chunk", [100, 3 * 256, 1 << 20], ids=lambda chunk: f"chunk{chunk}")
@pytest.mark.parametrize("name", gguf_header.BLOCKS)
def test_every_type_equals_the_gguf_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, chunk: int
) -> None:
    monkeypatch.setattr(ours, "_CHUNK_ELEMENTS", chunk)
    kind = GGMLQuantizationType[name]
    raw = random_blocks(name, (11, 768))
    writer = model_writer(tmp_path / "m.gguf", "qwen3")
    if name in ("F32", "F16"):
        raw = raw.view({"F32": np.float32, "F16": np.float16}[name])
        writer.add_tensor("output.weight", raw)
    else:
        writer.add_tensor("output.weight", raw, raw_dtype=kind)
    finish(writer)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, kind)
    with GGUFFile(tmp_path / "m.gguf") as file:
        for dtype in (torch.float32, torch.bfloat16):
            ((hf_name, tensor),) = file.iter_tensors(dtype)
            assert hf_name == "lm_head.weight"
            assert (tensor.dtype, tensor.shape) == (dtype, (11, 768))
            wanted = torch.from_numpy(expected.copy()).to(dtype)
            torch.testing.assert_close(tensor, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_weights_come_back_close_to_what_was_quantized(tmp_path: Path, name: str) -> None:
    kind = GGMLQuantizationType[name]
    weights = np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    writer = model_writer(tmp_path / "m.gguf", "qwen3")
    quantized = gguf.quants.quantize(weights, kind)
    writer.add_tensor("output.weight", quantized, raw_dtype=kind)
    finish(writer)
    with GGUFFile(tmp_path / "m.gguf") as file:
        ((_, tensor),) = file.iter_tensors(torch.float32)
    coarsest_step = 2 * np.abs(weights).max() / 15
    assert np.abs(tensor.numpy() - weights).max() <= coarsest_step


def test_chunks_bound_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "m.gguf", "llama")
    chunk = HEAD_DIM * HIDDEN  # one head: the unit in which rows of q and k are read
    sizes = []
    dequantize = ours._dequantize
    monkeypatch.setattr(ours, "_CHUNK_ELEMENTS", chunk)
    monkeypatch.setattr(
        ours, "_dequantize", lambda blocks, name: sizes.append(blocks.numel() // 4) or dequantize(blocks, name)
    )
    with GGUFFile(tmp_path / "m.gguf") as file:
        total = sum(tensor.numel() for _, tensor in file.iter_tensors(torch.float32))
    assert max(sizes) == chunk and sum(sizes) == total


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3moe"])
def test_weights_and_config_equal_transformers(tmp_path: Path, arch: str, tied: bool) -> None:
    """transformers reads GGUF files too: the reference for names, the order of rows and the settings."""
    write_model(tmp_path / "m.gguf", arch, tied=tied)
    config, _, tensors = read(tmp_path / "m.gguf")
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config))
    oracle = load_gguf_checkpoint(tmp_path / "m.gguf", return_tensors=True, model_to_load=model)
    if arch == "qwen3moe":
        tensors = fuse_experts(tensors)
    expected = model.state_dict().keys() - ({"lm_head.weight"} if tied else set())
    assert tensors.keys() == oracle["tensors"].keys() == expected
    for name, tensor in oracle["tensors"].items():
        assert tensor.shape == model.state_dict()[name].shape
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, msg=name)
    assert config["architectures"] == [type(model).__name__]
    assert (config["head_dim"], config["torch_dtype"]) == (HEAD_DIM, "float32")
    assert config["attention_bias"] == (arch == "qwen2")
    shared = oracle["config"].keys() & config.keys()
    assert len(shared) >= 12
    assert {key: config[key] for key in shared} == {key: oracle["config"][key] for key in shared}


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Experts as transformers 5 stores them: gate and up in one tensor."""
    fused = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in range(LAYERS):
        part = {kind: f"model.layers.{layer}.mlp.experts.{kind}_proj" for kind in ("gate", "up", "down", "gate_up")}
        gate, up, down = (tensors[f"{part[kind]}.weight"] for kind in ("gate", "up", "down"))
        fused[part["gate_up"]], fused[part["down"]] = torch.cat([gate, up], dim=1), down
    return fused


def test_llama_biases_are_reordered_with_their_weights(tmp_path: Path) -> None:
    rows = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    # Converters interleave the two halves of each head.
    written = rows.reshape(HEADS, 2, HEAD_DIM // 2).swapaxes(1, 2).reshape(-1)
    writer = model_writer(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.attn_q.bias", written.copy())
    writer.add_tensor("blk.0.attn_q.weight", np.repeat(written[:, None], HIDDEN, axis=1).copy())
    finish(writer)
    with GGUFFile(tmp_path / "m.gguf") as file:
        tensors = dict(file.iter_tensors(torch.float32))
    assert tensors["model.layers.0.self_attn.q_proj.bias"].tolist() == rows.tolist()
    assert tensors["model.layers.0.self_attn.q_proj.weight"][:, 5].tolist() == rows.tolist()


def test_a_tensor_no_model_has_is_named(tmp_path: Path) -> None:
    writer = model_writer(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ssm_conv1d.weight", np.ones((2, 2), np.float32))
    finish(writer)
    with GGUFFile(tmp_path / "m.gguf") as file, pytest.raises(CheckpointError, match="ssm_conv1d.*llama"):
        next(file.iter_tensors(torch.float32))


def test_tensors_are_the_same_without_the_vocabulary(tmp_path: Path) -> None:
    writer = model_writer(tmp_path / "m.gguf", "llama")
    writer.add_token_merges(["a ö", "b c"])
    finish(writer)
    with GGUFFile(tmp_path / "m.gguf") as file, GGUFFile(tmp_path / "m.gguf", keeps_vocabulary=False) as without:
        assert without.tensors == file.tensors
        assert file.metadata["tokenizer.ggml.merges"] == ["a ö", "b c"]
        assert without.metadata == file.metadata | {"tokenizer.ggml.merges": [], "tokenizer.ggml.tokens": []}


def test_a_file_that_shrinks_while_open_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama")
    with GGUFFile(path) as file:
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(CheckpointError, match="became shorter"):
            list(file.iter_tensors(torch.float32))


# ---- the config ----


def test_moe_settings(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "qwen3moe")
    config, _, tensors = read(tmp_path / "m.gguf")
    assert config["model_type"] == "qwen3_moe"
    assert (config["num_experts"], config["num_experts_per_tok"]) == (EXPERTS, 2)
    assert config["moe_intermediate_size"] == EXPERT_FFN
    assert config["norm_topk_prob"] is True
    assert tensors["model.layers.1.mlp.experts.down_proj.weight"].shape == (EXPERTS, HIDDEN, EXPERT_FFN)
    assert tensors["model.layers.1.mlp.gate.weight"].shape == (EXPERTS, HIDDEN)


def test_rope_factors_become_part_of_the_config(tmp_path: Path) -> None:
    factors = np.linspace(1, 32, HEAD_DIM // 2).astype(np.float32)
    writer = model_writer(tmp_path / "m.gguf", "llama")
    for name, tensor in (model_tensors("llama") | {"rope_freqs.weight": factors}).items():
        writer.add_tensor(name, tensor)
    finish(writer)
    config, _, tensors = read(tmp_path / "m.gguf")
    assert config["rope_scaling"] == {"rope_type": "gguf_factors", "factors": factors.tolist()}
    assert not any("rope" in name for name in tensors)


def test_rope_scaling_of_the_metadata(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "qwen2", qwen2__rope__scaling__type="linear", qwen2__rope__scaling__factor=4.0)
    assert read(tmp_path / "m.gguf")[0]["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    write_model(
        tmp_path / "y.gguf",
        "qwen2",
        qwen2__rope__scaling__type="yarn",
        qwen2__rope__scaling__factor=4.0,
        qwen2__rope__scaling__original_context_length=64,
    )
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert read(tmp_path / "y.gguf")[0]["rope_scaling"] == yarn


def test_a_sliding_window_makes_a_llama_a_mistral(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama", llama__attention__sliding_window=64)
    config = read(tmp_path / "m.gguf")[0]
    assert (config["architectures"], config["sliding_window"]) == (["MistralForCausalLM"], 64)


def test_every_token_that_ends_a_text_counts(tmp_path: Path) -> None:
    write_model(tmp_path / "m.gguf", "llama", tokenizer__ggml__eot_token_id=5, tokenizer__ggml__eom_token_id=1)
    assert read(tmp_path / "m.gguf")[1] == {"eos_token_id": [1, 5], "bos_token_id": 0}


def test_a_16_bit_file_is_bfloat16(tmp_path: Path) -> None:
    writer = model_writer(tmp_path / "m.gguf", "llama")
    for name, tensor in model_tensors("llama").items():
        writer.add_tensor(name, tensor.astype(np.float16) if tensor.ndim > 1 else tensor)
    finish(writer)
    assert read(tmp_path / "m.gguf")[0]["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama__rope__dimension_count": 8}, "rope.dimension_count is 8 of 16"),
        ({"llama__expert_count": 8}, "expert_count is 8 in a llama model"),
        ({"llama__rope__scaling__type": "longrope"}, "'longrope'; supported are none, linear and yarn"),
        ({"llama__rope__scaling__type": "linear"}, "rope.scaling.factor is None"),
        ({"llama__attention__sliding_window": 0}, "attention.sliding_window is 0; it must be an integer from 1"),
        ({"llama__attention__key_length": "wide"}, "attention.key_length is 'wide'"),
        ({"llama__attention__key_length": [16, 8]}, r"attention.key_length differs between layers \(\[16, 8\]\)"),
        ({"llama__rope__scaling__type": "linear", "llama__rope__scaling__factor": math.nan}, "factor is nan"),
        ({"tokenizer__ggml__eot_token_id": VOCAB}, f"eot_token_id is {VOCAB}; it must be a token id below {VOCAB}"),
        ({"split__count": 3}, "is one of 3 parts; join them first"),
    ],
)
def test_settings_that_cannot_be_honoured(tmp_path: Path, metadata: dict[str, Any], message: str) -> None:
    path = tmp_path / "m.gguf"
    write_model(path, "llama", **metadata)
    with pytest.raises(CheckpointError, match=message) as refusal:
        read(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize(("name", "nearest"), [("bert", ""), ("mistral4", r" \(nearest: mistral3\)")])
def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path, name: str, nearest: str) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", name)
    finish(writer)
    with (
        GGUFFile(tmp_path / "m.gguf") as file,
        pytest.raises(CheckpointError, match=f"'{name}', which is not known{nearest}; known: .*gemma3, .*llama"),
    ):
        file.hf_config()


def test_layers_that_are_missing_are_counted(tmp_path: Path) -> None:
    writer = model_writer(tmp_path / "m.gguf", "llama")
    for name, tensor in model_tensors("llama").items():
        if not name.startswith("blk.1."):
            writer.add_tensor(name, tensor)
    finish(writer)
    with pytest.raises(CheckpointError, match="block_count is 2, but tensors of 1 layers"):
        read(tmp_path / "m.gguf")


# ---- the default model ----


def test_the_default_model(default_model_path: Path) -> None:
    with GGUFFile(default_model_path) as file:
        config, metadata = file.hf_config(), file.metadata
        embedding = file.tensors["token_embd.weight"]
        q_proj = file.tensors["blk.7.attn_q.weight"]
        assert (config["model_type"], config["vocab_size"], config["tie_word_embeddings"]) == ("llama", 49152, True)
        assert (config["num_hidden_layers"], config["head_dim"], config["rope_theta"]) == (30, 64, 100_000.0)
        assert file.generation_config() == {"eos_token_id": [2], "bos_token_id": 1}
        tensors = {
            name: tensor for name, tensor in file.iter_tensors(torch.bfloat16) if "layers" not in name or ".7." in name
        }
    data = np.memmap(default_model_path, np.uint8, "r")
    for info, name in ((embedding, "model.embed_tokens.weight"), (q_proj, "model.layers.7.self_attn.q_proj.weight")):
        raw = data[info.offset : info.offset + info.nbytes].reshape(info.shape[0], -1)[:640]
        expected = torch.from_numpy(gguf.quants.dequantize(raw, GGMLQuantizationType[info.type_name]))
        if info is q_proj:
            expected = expected.reshape(9, 32, 2, 576).swapaxes(1, 2).reshape(576, 576)
        assert torch.equal(tensors[name][:640], expected.bfloat16())
    tokenizer = build_tokenizer(metadata)
    assert tokenizer.encode("In 2024, 12345 is 7.").tokens == [
        "In", "Ġ", "2", "0", "2", "4", ",", "Ġ", "1", "2", "3", "4", "5", "Ġis", "Ġ", "7", "."
    ]  # fmt: skip
    text = "<|im_start|>user\nWhat is 文?<|im_end|>\n"
    ids = tokenizer.encode(text).ids
    assert ids[0] == 1 and ids[-2] == 2
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert special_tokens(metadata)["eos_token"] == "<|im_end|>"
    assert "<|im_start|>system" in (chat_template(metadata) or "")
