"""GGUF files whose weights stay packed: the exact numbers of the gguf package, and the tokens of the unpacked file."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from nanovllm import LLM
from nanovllm.checkpoint.gguf import GGUFFile
from nanovllm.checkpoint.gguf_header import BLOCKS
from nanovllm.checkpoint.packed.gguf import ReorderedColumns
from nanovllm.checkpoint.packed.gguf_types import FORMS, in_blocks
from nanovllm.checkpoint.packed.groups import dequantize as dequantize_pieces
from nanovllm.errors import CheckpointError, ConfigError
from nanovllm.weights.groups import GroupFormat
from tests.checkpoint.gguf_files import finish
from tests.helpers import greedy_params, model_dir
from tests.weights.packed_files import memory_of

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, EXPERTS = 256, 4, 2, 64, 40, 4
HALVES = {"Q4_1": (0, 2), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}  # where float16 numbers are
PROMPTS = [[3, 7, 30, 9], [5] * 20 + [11]]


def random_blocks(kind: str, shape: tuple[int, ...], scale: float = 0.01) -> np.ndarray:
    """Random bytes as blocks of a type, with scales of about this size and either sign."""
    rng = np.random.default_rng(len(kind) + sum(shape))
    block, size = BLOCKS[kind]
    raw = rng.integers(0, 256, (*shape[:-1], shape[-1] // block, size), dtype=np.uint8)
    for first in HALVES.get(kind, (0,)):
        numbers = rng.normal(size=raw.shape[:-1]) * scale
        raw[..., first : first + 2] = numbers.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(*shape[:-1], -1)


def write(path: Path, arch: str, types: dict[str, str]) -> None:
    """A model of two layers; `types` by the names of tensors in a layer, or of the head."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(2)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv([0, KV_HEADS] if arch == "lfm2" else KV_HEADS)  # without: a convolution
    writer.add_key_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    shapes = {"attn_q": (256, HIDDEN), "attn_k": (128, HIDDEN), "attn_v": (128, HIDDEN), "attn_output": (HIDDEN, 256)}
    norms = ["attn_norm", "ffn_norm"]
    if arch == "qwen3moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(HIDDEN)
        shapes |= {f"ffn_{name}_exps": (EXPERTS, HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
        shapes["ffn_gate_inp"] = (EXPERTS, HIDDEN)
    else:
        shapes |= {f"ffn_{name}": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")}
    convolution = {name: shape for name, shape in shapes.items() if name.startswith("ffn")}
    convolution |= {"shortconv.in_proj": (3 * HIDDEN, HIDDEN), "shortconv.out_proj": (HIDDEN, HIDDEN)}
    if arch == "lfm2":
        writer.add_shortconv_l_cache(3)
    rng = np.random.default_rng(1)
    for layer in range(2):
        convolves = arch == "lfm2" and layer == 0
        for name in norms:
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, np.float32))
        if convolves:
            filters = rng.normal(size=(HIDDEN, 3)).astype(np.float32)
            writer.add_tensor(f"blk.{layer}.shortconv.conv.weight", filters)
        elif arch != "llama":
            for name in ("attn_q_norm", "attn_k_norm"):
                writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HEAD_DIM, np.float32))
        for name, shape in (convolution if convolves else shapes).items():
            kind = types.get(f"{layer}.{name}", types.get(name, "F32"))
            if kind in FORMS:
                scale = 0.0005 if kind.endswith("K") else 0.01
                blocks = random_blocks(kind, shape, scale)
                writer.add_tensor(f"blk.{layer}.{name}.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
            else:
                writer.add_tensor(f"blk.{layer}.{name}.weight", rng.normal(size=shape).astype(np.float32) / 16)
    writer.add_tensor("token_embd.weight", rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32))
    last_norm = "token_embd_norm" if arch == "lfm2" else "output_norm"
    writer.add_tensor(f"{last_norm}.weight", np.ones(HIDDEN, np.float32))
    head = random_blocks("Q6_K", (VOCAB, HIDDEN), 0.0005)
    writer.add_tensor("output.weight", head, raw_dtype=GGMLQuantizationType.Q6_K)
    finish(writer)


# As in files of type Q4_K_M: some of the values and down projections have more bits than the rest.
LLAMA = {"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q6_K", "attn_output": "Q5_K", "0.ffn_gate": "Q4_0"}
LLAMA |= {"0.ffn_up": "Q4_1", "0.ffn_down": "Q5_0", "1.ffn_gate": "Q4_K", "1.ffn_up": "Q4_K", "1.ffn_down": "Q8_0"}
MOE = {"attn_q": "Q5_1", "attn_k": "Q5_1", "attn_v": "Q5_1", "attn_output": "Q8_0", "ffn_gate_exps": "Q4_K"}
MOE |= {"0.ffn_up_exps": "Q4_K", "1.ffn_up_exps": "Q6_K", "ffn_down_exps": "Q6_K"}
CONVOLUTION = LLAMA | {"shortconv.in_proj": "Q4_K", "shortconv.out_proj": "Q6_K"}
TYPES = {"llama": LLAMA, "qwen3moe": MOE, "lfm2": CONVOLUTION}
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_model_len": 128, "num_kv_cache_blocks": 16}
OPTIONS |= {"skip_tokenizer_init": True, "cpu_kernels": "torch"}


@pytest.fixture(scope="module", params=["llama", "qwen3moe"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / f"{request.param}.gguf"
    write(path, request.param, TYPES[request.param])
    return path


def test_packed_and_unpacked_files_give_the_same_tokens(file: Path) -> None:
    found = []
    for quantization in (None, "gguf"):
        with LLM(file, quantization=quantization, **OPTIONS) as llm:
            found.append([o["token_ids"] for o in llm.generate(PROMPTS, greedy_params(10), use_tqdm=False)])
            model = llm.llm_engine._core.executor.model
            names = [layer.mixer.qkv_proj.weight.format_name for layer in model.layers]
            assert model.lm_head.weight.format_name == ("dense" if quantization is None else "int8_groups")
    assert found[0] == found[1]
    assert names == ["stacked"] * 2 if "llama" in file.name else ["int8_groups"] * 2


def test_a_plan_counts_its_bytes(file: Path) -> None:
    options = {"device": "cpu", "dtype": "float32", "num_kv_cache_blocks": 4, "cpu_kernels": "torch"}
    planned, held = [], []
    for quantization in (None, "gguf"):
        planned.append(LLM.plan(str(file), quantization=quantization, **options).weight_bytes)
        with LLM(file, quantization=quantization, **OPTIONS) as llm:
            held.append(memory_of(llm))
    assert 0 < planned[0] - planned[1] == held[0] - held[1]


@pytest.mark.parametrize("kind", FORMS)
def test_numbers_are_exact(tmp_path: Path, kind: str) -> None:
    """Also of a rank that holds the second half of the columns, and of one expert in a stack."""
    path = tmp_path / "one.gguf"
    write(path, "qwen3moe", dict.fromkeys(("ffn_down_exps", "attn_output"), kind))
    expected = torch.from_numpy(
        dequantize(random_blocks(kind, (HIDDEN, 256), 0.0005 if "K" in kind else 0.01), GGMLQuantizationType[kind])
    )
    with GGUFFile(path) as opened:
        stored = dict(opened.stored_tensors(torch.float32))
        tensor: Any = stored["model.layers.1.self_attn.o_proj.weight"]
        for columns in (slice(0, 256), slice(128, 256), slice(64, 128)):
            size = columns.stop - columns.start
            form = GroupFormat(FORMS[kind], columns=256, start=columns.start)
            weight = form.empty((HIDDEN, size), dtype=torch.float32, device=torch.device("cpu"))
            weight.load((slice(0, HIDDEN),), tensor, (slice(None), columns))
            assert torch.equal(weight.dequantized(), expected[:, columns])
        experts: Any = stored["model.layers.1.mlp.experts.down_proj.weight"]
        sizes = FORMS[kind].sizes_in(256)
        pieces = experts.pieces((slice(2, 3), slice(8, 24)), sizes, torch.device("cpu"))
        dense = experts.read((slice(2, 3), slice(8, 24)))[0]
    form = GroupFormat(FORMS[kind], columns=256)
    weight = form.empty((16, 256), dtype=torch.float32, device=torch.device("cpu"))
    for held, new in zip(weight.pieces, pieces, strict=True):
        assert (held is None) == (new is None)
        if held is not None:
            held.copy_(new)
    assert torch.equal(weight.dequantized(), dense)


def test_infinite_scales_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    write(path, "llama", {"attn_output": "Q8_0"})
    raw = bytearray(path.read_bytes())
    with GGUFFile(path) as opened:
        offset = opened.tensors["blk.1.attn_output.weight"].offset
    raw[offset : offset + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match="layers.1.self_attn.o_proj.weight: a scale is infinite or NaN"):
        LLM(path, quantization="gguf", **OPTIONS)


def test_only_gguf_files_can_stay_packed(file: Path) -> None:
    with pytest.raises(ConfigError, match="quantization='gguf' keeps the weights of a GGUF file packed, and the model"):
        LLM(model_dir("llama"), quantization="gguf", **OPTIONS)
    with pytest.raises(ConfigError, match="quantization='gguf' .* and load_format='dummy' does not read it"):
        LLM(file, quantization="gguf", load_format="dummy", **OPTIONS)


@pytest.mark.parametrize("kind", FORMS)
def test_columns_in_another_order_stay_packed(kind: str, tmp_path: Path) -> None:
    """In blocks of half of what shares a unit in K types; whole, and a part as a rank reads it."""
    writer = gguf.GGUFWriter(tmp_path / "tensor.gguf", "qwen2")
    blocks = random_blocks(kind, (6, 512))
    writer.add_tensor("blk.0.attn_output.weight", blocks, raw_dtype=GGMLQuantizationType[kind])
    finish(writer)
    order = [2, 0, 3, 1]
    expected = torch.tensor(dequantize(blocks, GGMLQuantizationType[kind])).view(6, 4, 128)[:, order].flatten(1)
    with GGUFFile(tmp_path / "tensor.gguf") as file:
        ((_, stored),) = file.stored_tensors(torch.float32)
        tensor = ReorderedColumns(stored, order, 128)
        assert tensor.form == in_blocks(FORMS[kind], 128) and tensor.form is not None
        assert torch.equal(tensor.read(), expected)
        for part in ((), (slice(1, 4), slice(64, 320))):
            columns = range(*part[1].indices(512)) if part else range(512)
            sizes = tensor.form.sizes_in(512, columns.start, len(columns))
            pieces = tensor.pieces(part, sizes, torch.device("cpu"))
            assert torch.equal(dequantize_pieces(pieces, tensor.form, sizes), expected[part])
