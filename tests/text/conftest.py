"""The tokenizers that several test files of this folder use."""

import shutil

import pytest
from transformers import AutoTokenizer

from nanovllm.text.tokenizer import Tokenizer
from tests.text.tokenizer_files import QWEN3, SMALL


@pytest.fixture(scope="module", params=["small", "qwen3"])
def pair(request):
    """Our tokenizer and that of transformers, from the same folder."""
    folder = SMALL if request.param == "small" else QWEN3
    if not folder.is_dir():
        pytest.skip("needs the Qwen3 tokenizer: set NANOVLLM_QWEN3_TOKENIZER to its folder")
    return Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(str(folder))


@pytest.fixture(scope="module")
def small():
    return Tokenizer.from_dir(SMALL)


@pytest.fixture
def folder(tmp_path):
    """A copy of the small checkpoint's tokenizer, which a test may change."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SMALL / name, tmp_path / name)
    return tmp_path
