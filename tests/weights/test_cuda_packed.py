"""Packed weights on a GPU: the tokens of the dense model, in graphs and one by one."""

from pathlib import Path
from typing import Any

import pytest

from nanovllm.errors import ConfigError
from tests.helpers import greedy_params, open_llm
from tests.weights import test_fp8, test_gguf_groups, test_gpt_oss, test_groups, test_int8_inputs
from tests.weights.packed_files import PROMPTS, PackedFiles, check_greedy, generate, write_packed

pytestmark = pytest.mark.gpu

MODULES: dict[str, Any] = {
    "fp8 blocks": (test_fp8.pack_blocks, test_fp8.WEIGHT_ONLY_BLOCKS),
    "fp8 rows": (test_fp8.pack_rows, test_fp8.WEIGHT_ONLY),
    "int8": (test_int8_inputs.pack, test_int8_inputs.WEIGHT_ONLY),
}


def write(case: str, folder: Path) -> PackedFiles:
    if case in MODULES:
        return write_packed("qwen3-moe", folder, *MODULES[case])
    if case == "gpt-oss":
        return test_gpt_oss.write(folder)
    return test_groups.write(case, folder, "qwen3-moe")


@pytest.mark.parametrize("case", [*MODULES, "awq", "gptq ordered", "gptq 8", "gpt-oss"])
def test_tokens_of_the_dense_model(tmp_path: Path, case: str) -> None:
    files = write(case, tmp_path)
    for eager in (False, True):
        check_greedy(files, device="cuda", enforce_eager=eager)


@pytest.mark.parametrize(
    ("pack", "config"), [(test_fp8.pack_blocks, test_fp8.BLOCKS), (test_int8_inputs.pack, test_int8_inputs.W8A8)]
)
def test_rounded_inputs(tmp_path: Path, pack: Any, config: dict[str, Any]) -> None:
    files = write_packed("qwen3", tmp_path, pack, config)
    tokens = [generate(files.packed, device="cuda", enforce_eager=eager) for eager in (False, True)]
    assert len(tokens[0]) == len(PROMPTS) and tokens[0] == tokens[1]


@pytest.mark.parametrize("quantization", ["fp8", "int8", "int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_made_while_loading(quantization: str, dtype: str) -> None:
    with open_llm("qwen3-moe", device="cuda", quantization=quantization, dtype=dtype) as llm:
        assert len(llm.generate(PROMPTS, use_tqdm=False)) == len(PROMPTS)


def test_a_packed_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "moe.gguf"
    test_gguf_groups.write(path, "qwen3moe", test_gguf_groups.MOE)
    options = {"device": "cuda", "skip_tokenizer_init": True}
    with open_llm(path, quantization="gguf", **options) as packed, open_llm(path, **options) as dense:
        found = [llm.generate(test_gguf_groups.PROMPTS, greedy_params(10), use_tqdm=False) for llm in (packed, dense)]
    assert [o["token_ids"] for o in found[0]] == [o["token_ids"] for o in found[1]]


def test_deterministic(tmp_path: Path) -> None:
    files = test_groups.write("awq", tmp_path, "qwen3-wide")
    with open_llm(files.packed, device="cuda", deterministic=True, dtype="bfloat16") as llm:
        together = llm.generate(PROMPTS, greedy_params(10), use_tqdm=False)
        alone = [llm.generate([prompt], greedy_params(10), use_tqdm=False)[0] for prompt in PROMPTS]
    assert [o["token_ids"] for o in together] == [o["token_ids"] for o in alone]


def test_deterministic_is_refused(tmp_path: Path) -> None:
    files = write("gptq ordered", tmp_path)
    with pytest.raises(ConfigError, match="deterministic=True: no deterministic kernel computes stacked weights"):
        open_llm(files.packed, device="cuda", deterministic=True, dtype="bfloat16")
