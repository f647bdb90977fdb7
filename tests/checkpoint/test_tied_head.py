"""Checkpoints whose config ties the head to the embedding, and which store a head as well."""

import logging
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nanovllm.checkpoint import as_stored
from nanovllm.errors import CheckpointError
from nanovllm.models.registry import describe
from tests.helpers import assert_greedy, copy_of, edit_config, greedy_params, open_llm, prompt_of


@pytest.mark.parametrize("cpu_kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ["llama", "ministral3"])  # in one file and in several
def test_another_head_is_used_as_in_transformers(
    family: str, cpu_kernels: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = copy_of(family, tmp_path)
    edit_config(folder, lambda config: config.update(tie_word_embeddings=True))
    with caplog.at_level(logging.WARNING, logger="nanovllm"), open_llm(folder, cpu_kernels=cpu_kernels) as llm:
        (output,) = llm.generate([prompt_of(37)], greedy_params(8), use_tqdm=False)
    assert_greedy(family, prompt_of(37), output["token_ids"])
    assert "the files hold two different ones" in caplog.text


@pytest.mark.parametrize("prefix", ["", "language_model."])
def test_rows_that_are_compared(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(as_stored, "STEP", 4)
    monkeypatch.setattr(as_stored, "LAST_ROWS", 2)
    embedding = torch.randn(16, 8, dtype=torch.bfloat16)

    def stores_other_head(head: torch.Tensor) -> bool:
        tensors = {f"{prefix}model.embed_tokens.weight": embedding, f"{prefix}lm_head.weight": head}
        save_file(tensors | {"model.embed_tokens_2.weight": embedding + 1}, tmp_path / "model.safetensors")
        return as_stored.stores_other_head(tmp_path)

    assert not stores_other_head(embedding.clone())
    assert not caplog.text
    for row in (0, 8, 14, 15):
        other = embedding.clone()
        other[row, 3] += 1
        assert stores_other_head(other)
    assert stores_other_head(embedding.float()) and stores_other_head(embedding[:15].clone())
    assert caplog.text.count("the files hold two different ones") == 6


def test_tied_files_without_a_head(tmp_path: Path) -> None:
    folder = copy_of("granite", tmp_path)
    assert "lm_head.weight" not in load_file(folder / "model.safetensors")
    assert describe(folder).config.tie_word_embeddings
    (folder / "model.safetensors").write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="model.safetensors: damaged"):
        describe(folder)
