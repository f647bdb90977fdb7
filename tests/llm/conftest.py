"""An open `LLM` and its greedy output, which several test files of this folder use."""

from collections.abc import Iterator

import pytest

from nanovllm import LLM, RequestOutput
from tests.helpers import TEXT_MODEL, greedy_params, open_llm
from tests.llm.support import TEXT, one


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with open_llm(TEXT_MODEL) as llm:
        yield llm


@pytest.fixture(scope="module")
def free(llm: LLM) -> RequestOutput:
    """The model's greedy output without stop conditions."""
    return one(llm, TEXT, greedy_params(40))
