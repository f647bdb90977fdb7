"""Models with a state per sequence: 8-bit weights, and rejected proposed tokens."""

from pathlib import Path

import pytest
from torch import Tensor

from nanovllm.engine.consistency import check_scheduler
from nanovllm.errors import CheckpointError
from nanovllm.models.registry import parse_config
from tests.helpers import assert_greedy, generate_by_reference, greedy_params, open_llm, prompt_of, scheduler_of
from tests.models.test_config import raw_config
from tests.test_proposer import TwoTokens
from tests.weights.packed_files import check_greedy, write_packed

FAMILIES = ("lfm2",)


@pytest.mark.parametrize("family", FAMILIES)
def test_int8(tmp_path: Path, family: str) -> None:
    def pack(module: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor] | None:
        if module == "lm_head":
            return None
        scale = weight.abs().amax(dim=1, keepdim=True) / 127
        return {"weight": weight}, (weight / scale).round() * scale

    check_greedy(write_packed(family, tmp_path, pack, {}), quantization="int8")


@pytest.mark.parametrize("family", FAMILIES)
def test_verified_rows_among_decodes_and_chunks(family: str) -> None:
    """One prompt is proposed for, the others only decode; a small budget adds chunks to the same steps."""
    prompts = [prompt_of(length) for length in (33, 5, 20, 47)]
    known = [prompt + generate_by_reference(family, prompt, 12) for prompt in prompts[:2]]
    proposer = TwoTokens(known)
    with open_llm(family, proposer=proposer, max_num_batched_tokens=12, overlap=True) as llm:
        outputs = llm.generate(prompts, greedy_params(12), use_tqdm=False)
        check_scheduler(scheduler_of(llm))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert_greedy(family, prompt, output["token_ids"])
    assert proposer.num_asked > 10


def test_lfm2_kinds_of_layers() -> None:
    raw = raw_config("lfm2")
    with pytest.raises(CheckpointError, match="layer_types=.* must say full_attention or conv for each layer"):
        parse_config(raw | {"layer_types": ["conv", "mamba", "conv"]})
    older = {"layer_types": None, "full_attn_idxs": [1], "block_ff_dim": raw.pop("intermediate_size")}
    assert parse_config(raw | older) == parse_config(raw_config("lfm2"))
