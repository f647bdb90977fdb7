"""GGUF: header, config, weights and tokenizer, against the gguf package, transformers and tokenizers."""

import json
import math
import os
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType
from tokenizers import pre_tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from nanovllm.checkpoint import gguf as ours
from nanovllm.checkpoint import gguf_header
from nanovllm.checkpoint.gguf import GGUFFile
from nanovllm.checkpoint.gguf_tokenizer import build_tokenizer, chat_template, special_tokens
from nanovllm.errors import CheckpointError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB, LAYERS, EXPERTS, EXPERT_FFN = 64, 4, 2, 16, 96, 40, 2, 4, 32
REPOSITORY = Path(__file__).parents[2]


# ---- small files, written by the gguf package ----


def layer_shapes(arch: str) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (HIDDEN,),
        "attn_q.weight": (q, HIDDEN),
        "attn_k.weight": (kv, HIDDEN),
        "attn_v.weight": (kv, HIDDEN),
        "attn_output.weight": (HIDDEN, q),
        "ffn_norm.weight": (HIDDEN,),
    }
    if arch == "qwen2":
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch in ("qwen3", "qwen3moe"):
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if arch == "qwen3moe":
        return shapes | {
            "ffn_gate_inp.weight": (EXPERTS, HIDDEN),
            "ffn_gate_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
            "ffn_up_exps.weight": (EXPERTS, EXPERT_FFN, HIDDEN),
            "ffn_down_exps.weight": (EXPERTS, HIDDEN, EXPERT_FFN),
        }
    return shapes | {
        "ffn_gate.weight": (FFN, HIDDEN),
        "ffn_up.weight": (FFN, HIDDEN),
        "ffn_down.weight": (HIDDEN, FFN),
    }


def model_tensors(arch: str, *, tied: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"token_embd.weight": (VOCAB, HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes(arch).items()}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def model_writer(path: Path, arch: str) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(50_000.0)
    writer.add_vocab_size(VOCAB)
    if arch != "llama":
        writer.add_key_length(HEAD_DIM)
    if arch == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(EXPERT_FFN)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(["<s>", "</s>", *(chr(ord("a") + i) for i in range(26)), "ab", "abc"])
    writer.add_token_types([3, 3] + [1] * 28)
    writer.add_token_merges(["a b", "ab c"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_model(path: Path, arch: str, *, tied: bool = False, **metadata: Any) -> dict[str, np.ndarray]:
    writer = model_writer(path, arch)
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key.replace("__", "."), value)
    tensors = model_tensors(arch, tied=tied)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    finish(writer)
    return tensors


def read(path: Path) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
    with GGUFFile(path) as file:
        return file.hf_config(), file.generation_config(), dict(file.iter_tensors(torch.float32))


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


def random_blocks(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random bytes as quantized blocks, NaN and infinite scales included."""
    block, size = gguf_header.BLOCKS[name]
    row = shape[-1] // block * size
    return np.random.default_rng(len(name)).integers(0, 256, (*shape[:-1], row), dtype=np.uint8)


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


def test_an_unknown_architecture_is_named_with_the_known_ones(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    finish(writer)
    with (
        GGUFFile(tmp_path / "m.gguf") as file,
        pytest.raises(CheckpointError, match="'mamba'.*llama, qwen2, qwen3, qwen3moe"),
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


# ---- damaged files ----


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor_info(name: str, dims: tuple[int, ...] = (8,), kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


def file_bytes(
    *parts: bytes, pairs: int = 0, tensors: int = 0, version: int = 3, magic: bytes = b"GGUF", data: int = 256
) -> bytes:
    head = struct.pack("<4sIQQ", magic, version, tensors, pairs) + b"".join(parts)
    return head + bytes(-len(head) % 32) + bytes(data)


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQI", 4, 1, 7)


U8, U32, STRING, ARRAY = 0, 4, 8, 9
TWO_WORDS = pair("k", ARRAY, struct.pack("<IQ", STRING, 2) + text("one") + text("two"))
DAMAGED = {
    "empty": (b"", "0 bytes are too few"),
    "magic": (file_bytes(magic=b"GGML"), "begins with b'GGML'"),
    "version1": (file_bytes(version=1), "GGUF version 0x1; supported are versions 2 and 3"),
    "big_endian": (file_bytes(version=3 << 24), "GGUF version 0x3000000.*little-endian"),
    "pairs": (file_bytes(pairs=2**63), f"states {2**63} metadata pairs.*only 264 bytes follow"),
    "tensors": (file_bytes(tensors=9), "states 9 tensors of at least 32 bytes, but only 264 bytes follow"),
    "key_length": (file_bytes(struct.pack("<Q", 2**40), pairs=1), f"key of metadata pair 0 has a length of {2**40}"),
    "cut_key": (file_bytes(struct.pack("<Q", 5000), pairs=1), "ends inside the key of metadata pair 0: 5000 bytes"),
    "utf8": (file_bytes(pair("k", STRING, text(b"\xff\xfe")), pairs=1), "metadata 'k' is not UTF-8"),
    "utf8_item": (
        file_bytes(pair("k", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"\xff")), pairs=1),
        "metadata 'k' is not UTF-8",
    ),
    "kind": (file_bytes(pair("k", 13, b""), pairs=1), "metadata 'k' has the unknown value type 13"),
    "same_key": (file_bytes(pair("k", U8, b"1"), pair("k", U8, b"2"), pairs=2), "metadata key 'k' occurs twice"),
    "array_count": (
        file_bytes(pair("k", ARRAY, struct.pack("<IQ", U8, 2**40)), pairs=1),
        f"metadata 'k' has {2**40} array items",
    ),
    "array_past_end": (
        file_bytes(pair("k", ARRAY, struct.pack("<IQ", U32, 2**20)), pairs=1),
        f"ends inside metadata 'k': {2**22} bytes",
    ),
    "strings_past_end": (
        file_bytes(pair("k", ARRAY, struct.pack("<IQ", STRING, 2**20)), pairs=1),
        f"metadata 'k': item [0-9]+ of {2**20} runs past the end",
    ),
    "last_string_cut": (
        file_bytes(TWO_WORDS, pairs=1)[: 24 + len(TWO_WORDS) - 1],
        "metadata 'k': item 1 of 2 runs past the end",
    ),
    "array_kind": (file_bytes(pair("k", ARRAY, struct.pack("<IQ", 99, 1)), pairs=1), "unknown value type 99"),
    "nested": (file_bytes(pair("k", ARRAY, nested(5)), pairs=1), "nests arrays deeper than 4"),
    "alignment": (file_bytes(pair("general.alignment", U32, struct.pack("<I", 24)), pairs=1), "alignment is 24"),
    "alignment0": (file_bytes(pair("general.alignment", U32, struct.pack("<I", 0)), pairs=1), "alignment is 0"),
    "no_dims": (file_bytes(tensor_info("t", ()), tensors=1), "tensor 't' has 0 dimensions"),
    "many_dims": (file_bytes(tensor_info("t", (1,) * 5), tensors=1), "tensor 't' has 5 dimensions"),
    "zero_dim": (file_bytes(tensor_info("t", (8, 0)), tensors=1), r"tensor 't' has shape \(0, 8\)"),
    "type": (file_bytes(tensor_info("t", kind=4), tensors=1), "tensor 't' has the ggml type 4.*Q4_1"),
    "row": (file_bytes(tensor_info("t", (8,), kind=3), tensors=1), "rows of 8 elements; Q4_1 needs multiples of 32"),
    "misaligned": (
        file_bytes(tensor_info("t", offset=8), tensors=1),
        "offset 8, which is not a multiple",
    ),
    "out_of_range": (file_bytes(tensor_info("t", offset=256), tensors=1), "needs 32 bytes at 320, but the file ends"),
    "overflow": (file_bytes(tensor_info("t", (2**63, 2**63)), tensors=1), f"needs {2**128} bytes"),
    "same_tensor": (file_bytes(tensor_info("t"), tensor_info("t", offset=64), tensors=2), "tensor 't' occurs twice"),
    "overlap": (file_bytes(tensor_info("t", (32,)), tensor_info("u", offset=64), tensors=2), "'t' and 'u' overlap"),
}


@pytest.mark.parametrize("damage", DAMAGED)
def test_damage_is_named(tmp_path: Path, damage: str) -> None:
    content, message = DAMAGED[damage]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message) as refusal:
        GGUFFile(path)
    assert str(path) in str(refusal.value)


@pytest.mark.parametrize("version", [2, 3])
def test_the_same_bytes_undamaged_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "fine.gguf"
    parts = (pair("k", ARRAY, nested(4)), tensor_info("t", (8, 2), offset=64), tensor_info("u"))
    path.write_bytes(file_bytes(*parts, pairs=1, tensors=2, version=version))
    with GGUFFile(path) as file:
        assert file.metadata == {"k": [[[[7]]]]}
        assert file.tensors["t"].shape == (2, 8)


def test_a_path_that_cannot_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(CheckpointError, match="cannot be opened"):
            GGUFFile(path)


def use_all(path: Path) -> None:
    with GGUFFile(path) as file:
        file.hf_config()
        file.generation_config()
        for _, tensor in file.iter_tensors(torch.float32):
            assert tensor.numel() < 1 << 20
        special_tokens(file.metadata)
        chat_template(file.metadata)
        build_tokenizer(file.metadata).encode("abc zz 12 <s>")


def outcome(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    try:
        use_all(path)
    except CheckpointError:
        return "refused"
    return "read"


def quantized_model(path: Path) -> bytes:
    writer = model_writer(path, "llama")
    for name, tensor in model_tensors("llama", tied=True).items():
        kind = GGMLQuantizationType.Q4_1 if tensor.ndim > 1 else GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.add_tensor("rope_freqs.weight", np.ones(HEAD_DIM // 2, np.float32))
    finish(writer)
    return path.read_bytes()


@pytest.mark.timeout(60)
def test_truncated_files_are_refused(tmp_path: Path) -> None:
    whole = quantized_model(tmp_path / "m.gguf")
    assert outcome(tmp_path / "m.gguf", whole) == "read"
    for length in range(0, len(whole) - 32, 97):  # the last tensor's padding may be missing
        assert outcome(tmp_path / "m.gguf", whole[:length]) == "refused", length


@pytest.mark.timeout(120)
def test_flipped_bytes_are_refused_or_read(tmp_path: Path) -> None:
    whole = quantized_model(tmp_path / "m.gguf")
    with GGUFFile(tmp_path / "m.gguf") as file:
        header = min(info.offset for info in file.tensors.values())
    rng = random.Random(0)
    outcomes = []
    for _ in range(1500):
        content = bytearray(whole)
        for _ in range(rng.choice([1, 1, 1, 4])):
            content[rng.randrange(header)] ^= rng.choice([1 << rng.randrange(8), 0xFF, rng.randrange(1, 256)])
        outcomes.append(outcome(tmp_path / "m.gguf", bytes(content)))
    assert set(outcomes) == {"refused", "read"}


# ---- the tokenizer ----

TEXTS = [
    "Hello world, it's 12345 o'clock; we'LL see 3.14159 and 007!",
    "  leading,  double   and trailing spaces  \n\n\t\ttabs\r\n end",
    "naïve café — “quotes” … Ünïcödé, e\u0301 combining",
    "日本語のテキスト、中文文本，한국어 텍스트, العربية, हिन्दी, ไทย",
    "emoji 🎉👩‍👩‍👧‍👦🇫🇷 ½ ² ٣٤٥ Ⅷ",
    "def f(x):\n    return {k: v**2 for k, v in x.items()}  # comment\n",
    "<|im_start|>user\nHi<|im_end|>\n<think>\n\n</think> <|im_start|><|im_start|>",
    "",
    " ",
    "x" * 300,
    "(a)[b]{c}<d>/*e*/ $100.00 @user #tag http://example.org/?q=1&r=2",
]


def byte_level_metadata(backend: tokenizers.Tokenizer, pre: str) -> dict[str, Any]:
    """The metadata that a converter writes for a byte-level tokenizer."""
    state = json.loads(backend.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    texts = {index: token for token, index in state["model"]["vocab"].items()}
    texts |= {index: token["content"] for index, token in added.items()}
    size = max(texts) + 4  # embeddings are padded to a round number
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(index, f"[PAD{index}]") for index in range(size)],
        "tokenizer.ggml.token_type": [token_type(texts, added, index) for index in range(size)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in state["model"]["merges"]],
    }


def token_type(texts: dict[int, str], added: dict[int, Any], index: int) -> int:
    if index in added:
        return 3 if added[index]["special"] else 4
    return 1 if index in texts else 5


def check_equal(ours: tokenizers.Tokenizer, oracle: tokenizers.Tokenizer, texts: list[str]) -> None:
    for value in texts:
        ids = oracle.encode(value, add_special_tokens=False).ids
        assert ours.encode(value).ids == ids, value
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == oracle.decode(ids, skip_special_tokens=skip), value


def random_texts(count: int) -> list[str]:
    rng = random.Random(0)
    ranges = [(32, 127), (32, 127), (0xA0, 0x2000), (0x3000, 0xD7FF), (0x1F300, 0x1F700), (48, 58), (9, 14)]
    return ["".join(chr(rng.randrange(*rng.choice(ranges))) for _ in range(rng.randrange(50))) for _ in range(count)]


def test_qwen2_kind_equals_the_real_qwen3_tokenizer() -> None:
    shared = REPOSITORY.parent / "shared" / "data" / "tokenizers" / "qwen3"
    path = Path(os.environ.get("NANOVLLM_QWEN3_TOKENIZER", shared))
    path = path / "tokenizer.json" if path.is_dir() else path
    if not path.is_file():
        pytest.skip("needs the Qwen3 tokenizer: NANOVLLM_QWEN3_TOKENIZER names no tokenizer.json")
    oracle = tokenizers.Tokenizer.from_file(str(path))
    tokenizer = build_tokenizer(byte_level_metadata(oracle, "qwen2"))
    check_equal(tokenizer, oracle, TEXTS + random_texts(500))
    assert tokenizer.get_vocab() == oracle.get_vocab()
    added, expected = tokenizer.get_added_tokens_decoder(), oracle.get_added_tokens_decoder()
    assert {index: str(token) for index, token in added.items()} == {i: str(t) for i, t in expected.items()}


@pytest.fixture(scope="module")
def trained() -> str:
    """A small byte-level BPE with merges across the splits of some pre-tokenizers, so that a wrong split is noticed."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    backend.train_from_iterator([text[i : i + 12] for text in TEXTS for i in range(0, len(text), 7)] * 3, trainer)
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False, special=False)])
    return backend.to_str()


def pre_tokenizer_oracles() -> dict[str, pre_tokenizers.PreTokenizer]:
    llama3 = tokenizers.Regex(TikTokenConverter().pattern)
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Sequence([pre_tokenizers.Split(llama3, "isolated"), whole_bytes])
    digits = pre_tokenizers.Sequence([pre_tokenizers.Split(tokenizers.Regex(r"\p{N}"), "isolated"), gpt2])
    return {"gpt-2": gpt2, "default": gpt2, "smollm": digits, "llama-bpe": split, "llama3": split}


@pytest.mark.parametrize("pre", ["gpt-2", "default", "smollm", "llama-bpe", "llama3"])
def test_byte_level_kinds(trained: str, pre: str) -> None:
    oracle = tokenizers.Tokenizer.from_str(trained)
    metadata = byte_level_metadata(oracle, pre)
    oracle.pre_tokenizer = pre_tokenizer_oracles()[pre]
    if pre.startswith("llama"):
        oracle.model.ignore_merges = True
    check_equal(build_tokenizer(metadata), oracle, TEXTS + random_texts(200))


def test_how_numbers_are_split(trained: str) -> None:
    expected = {
        "gpt-2": ["1234567"],
        "smollm": list("1234567"),
        "llama-bpe": ["123", "456", "7"],
        "qwen2": list("1234567"),
    }
    for pre, pieces in expected.items():
        tokenizer = build_tokenizer(byte_level_metadata(tokenizers.Tokenizer.from_str(trained), pre))
        assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str("1234567")] == pieces


def test_qwen2_normalizes_and_others_do_not(trained: str) -> None:
    backend = tokenizers.Tokenizer.from_str(trained)
    composed = {
        pre: build_tokenizer(byte_level_metadata(backend, pre)) for pre in ("qwen2", "llama-bpe", "smollm", "gpt-2")
    }
    same = {pre: t.encode("e\u0301").ids == t.encode("\u00e9").ids for pre, t in composed.items()}
    assert same == {"qwen2": True, "llama-bpe": False, "smollm": False, "gpt-2": False}


def test_llama3_takes_a_whole_word_that_no_merge_makes(trained: str) -> None:
    metadata = byte_level_metadata(tokenizers.Tokenizer.from_str(trained), "llama-bpe")
    metadata["tokenizer.ggml.tokens"] += ["Qwertz"]
    metadata["tokenizer.ggml.token_type"] += [1]
    assert build_tokenizer(metadata).encode("Qwertz").tokens == ["Qwertz"]
    assert len(build_tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("Qwertz").tokens) > 1


SENTENCEPIECE = ["▁", "a", "b", "c", "▁a", "ab", "aa", "ba", "▁ab", "aab", "aaa", "bc", "abc", "▁▁", "é", "\n"]


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "[INST]", *SENTENCEPIECE]
    types = [2, 3, 3] + [6] * 256 + [4] + [1] * len(SENTENCEPIECE)
    order = [4, 9, 5, 12, 8, 11, 6, 7, 13, 10]  # the order of merges
    scores = [0.0] * 260 + [-float(order.index(i)) if i in order else -100.0 - i for i in range(len(SENTENCEPIECE))]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}


def sentencepiece_encode(text: str, metadata: dict[str, Any]) -> list[str]:
    """SentencePiece's definition: merge the neighbours whose piece has the highest score, leftmost first."""
    score = dict(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    symbols = list(("▁" + text).replace(" ", "▁"))
    while True:
        pairs = [
            (score[a + b], -i) for i, (a, b) in enumerate(zip(symbols, symbols[1:], strict=False)) if a + b in score
        ]
        if not pairs:
            break
        at = -max(pairs)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    known = [[s] if s in score else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols]
    return [piece for pieces in known for piece in pieces]


def test_sentencepiece_merges_by_score() -> None:
    metadata = sentencepiece_metadata()
    tokenizer = build_tokenizer(metadata)
    rng = random.Random(0)
    texts = ["".join(rng.choice("aabbc  é\nz🎉") for _ in range(rng.randrange(1, 20))) for _ in range(400)]
    for value in texts:
        encoded = tokenizer.encode(value)
        assert encoded.tokens == sentencepiece_encode(value, metadata), value
        assert tokenizer.decode(encoded.ids) == value


def test_sentencepiece_around_special_tokens() -> None:
    tokenizer = build_tokenizer(sentencepiece_metadata())
    encoded = tokenizer.encode("<s>[INST]ab</s>")
    assert encoded.tokens == ["<s>", "[INST]", "▁ab", "</s>"]
    assert tokenizer.decode(encoded.ids) == "[INST] ab"
    bare = build_tokenizer(sentencepiece_metadata(add_space_prefix=False))
    assert bare.encode("ab").tokens == ["ab"]
    assert bare.decode(bare.encode(" ab").ids) == " ab"


def test_roles_of_tokens(trained: str) -> None:
    assert special_tokens(sentencepiece_metadata()) == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
    }
    assert special_tokens(sentencepiece_metadata(add_bos_token=False))["add_bos_token"] is False
    byte_level = byte_level_metadata(tokenizers.Tokenizer.from_str(trained), "llama-bpe")
    assert special_tokens(byte_level) == {"add_bos_token": False}
    byte_level["tokenizer.ggml.bos_token_id"] = 1
    assert special_tokens(byte_level) == {"bos_token": "<|im_end|>", "add_bos_token": True}
    assert special_tokens(byte_level | {"tokenizer.ggml.pre": "qwen2"})["add_bos_token"] is False


def test_chat_template() -> None:
    assert chat_template({"tokenizer.chat_template": "{{ messages }}"}) == "{{ messages }}"
    assert chat_template({}) is None
    with pytest.raises(CheckpointError, match="chat_template is of type int"):
        chat_template({"tokenizer.chat_template": 3})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "bert"}, "tokenizer.ggml.model is 'bert'; supported are 'gpt2' and 'llama'"),
        ({"model": "gpt2", "pre": "tekken"}, "pre-tokenizer .* 'tekken' is not supported; supported are: smollm"),
        ({"model": "gpt2", "pre": None}, "pre-tokenizer .* None is not supported"),
        ({"model": "gpt2", "pre": "gpt-2"}, "tokenizer.ggml.merges is missing"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a zz"]}, "its 1 merges do not fit its vocabulary"),
        ({"model": "gpt2", "pre": "gpt-2", "merges": ["a b c"]}, "its 1 merges do not fit its vocabulary"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": [1, 2]}, "tokenizer.ggml.tokens is of type list; it must be a list of str"),
        ({"token_type": [1]}, "there are 1 token types for 276 tokens"),
        ({"token_type": [7] * 276}, r"token types \[7\] are unknown"),
        ({"token_type": [5] * 276}, "the unknown token 0 is marked as unused"),
        ({"scores": [0.0]}, "there are 1 scores for 276 tokens"),
        ({"scores": [math.nan] * 276}, "a score is not a finite number"),
        ({"tokens": ["same"] * 276}, "token 'same' occurs twice, as 0 and as 1"),
        ({"tokens": [str(i) * 400 for i in range(276)]}, "token 100 has 1200 characters; at most 1024"),
        ({"unknown_token_id": 276}, "unknown_token_id is 276; it must be a token id below 276"),
        ({"add_space_prefix": 1}, "add_space_prefix is 1; it must be true or false"),
    ],
)
def test_tokenizers_that_cannot_be_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        build_tokenizer(sentencepiece_metadata(**changes))


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
