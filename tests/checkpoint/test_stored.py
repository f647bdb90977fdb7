"""A slice read from a stored tensor equals that slice of the whole tensor, and little more than the slice is read."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from nanovllm.checkpoint.gguf import GGUFFile
from nanovllm.checkpoint.safetensors import stored_tensors
from tests.checkpoint.gguf_files import finish, model_writer, random_blocks, write_model

PARTS = [
    (),
    (slice(0, 32),),
    (slice(16, 48),),
    (slice(None), slice(0, 32)),
    (slice(None), slice(16, 48)),
    (slice(32, 64), slice(32, 64)),
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_safetensors(tmp_path: Path, part: tuple[slice, ...]) -> None:
    tensors = {"matrix": torch.randn(64, 64), "vector": torch.randn(64), "stack": torch.randn(3, 64, 64)}
    save_file(tensors, tmp_path / "model.safetensors")
    wanted = {"matrix": part, "vector": part[:1], "stack": (slice(1, 2), *part)}
    for name, stored in stored_tensors(tmp_path):
        tensor, cut = tensors.pop(name), wanted[name]
        assert stored.shape == tensor.shape
        assert torch.equal(stored.read(cut), tensor[cut]) and torch.equal(stored.read(), tensor)
    assert not tensors


@pytest.mark.parametrize("part", PARTS, ids=str)
@pytest.mark.parametrize("name", ["F32", "BF16", "Q8_0", "Q4_0", "Q5_1"])
def test_gguf(tmp_path: Path, name: str, part: tuple[slice, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    kind = gguf.GGMLQuantizationType[name]
    writer = model_writer(tmp_path / "a.gguf", "qwen3moe")
    blocks = {"token_embd.weight": (64, 64), "blk.0.ffn_up_exps.weight": (3, 64, 64)}
    for tensor, shape in blocks.items():
        writer.add_tensor(tensor, random_blocks(name, shape), raw_dtype=kind)
    finish(writer)
    monkeypatch.setattr("nanovllm.checkpoint.gguf._CHUNK_ELEMENTS", 700)
    with GGUFFile(tmp_path / "a.gguf") as file:
        matrix, stack = (stored for _, stored in file.stored_tensors(torch.float32))
        torch.testing.assert_close(matrix.read(part), matrix.read()[part], rtol=0, atol=0, equal_nan=True)
        expert = (slice(1, 2), *part)
        torch.testing.assert_close(stack.read(expert), stack.read()[expert], rtol=0, atol=0, equal_nan=True)


def test_heads_that_are_reordered(tmp_path: Path) -> None:
    write_model(tmp_path / "a.gguf", "llama")
    with GGUFFile(tmp_path / "a.gguf") as file:
        stored = dict(file.stored_tensors(torch.float32))
        q = stored["model.layers.0.self_attn.q_proj.weight"]
        assert torch.equal(q.read((slice(16, 48),)), q.read()[16:48])


def test_rows_that_are_not_wanted_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "a.gguf", "llama")
    read: list[int] = []
    original = GGUFFile.read

    def count(self: GGUFFile, offset: int, target: memoryview) -> None:
        read.append(len(target))
        original(self, offset, target)

    monkeypatch.setattr(GGUFFile, "read", count)
    with GGUFFile(tmp_path / "a.gguf") as file:
        stored = dict(file.stored_tensors(torch.float32))["model.embed_tokens.weight"]
        stored.read((slice(10, 20),))
    assert sum(read) == 10 * stored.shape[1] * np.dtype(np.float32).itemsize
