"""Which factors of longrope an engine uses depends on its longest sequence alone."""

import math
from pathlib import Path
from typing import Any

from tests.helpers import assert_greedy, copy_of, edit_config, generate_by_reference, greedy_params, open_llm, prompt_of

NAME = "phi4-mini"  # whose reference uses its short factors for up to 256 tokens


def test_long_factors_also_for_short_sequences(tmp_path: Path) -> None:
    def as_long(config: dict[str, Any]) -> None:
        rope = config["rope_parameters"]
        rope["attention_factor"] = math.sqrt(1 + math.log(512 / 256) / math.log(256))
        rope["short_factor"], rope["long_factor"] = [50.0] * 6, rope["short_factor"]
        config["original_max_position_embeddings"] = rope["original_max_position_embeddings"] = 64

    folder = copy_of(NAME, tmp_path)
    edit_config(folder, as_long)
    prompt = prompt_of(40)
    with open_llm(folder, max_model_len=65) as llm:
        (output,) = llm.generate(prompt, greedy_params(10), use_tqdm=False)
    assert_greedy(NAME, prompt, output["token_ids"])
    with open_llm(folder, max_model_len=64) as llm:
        (output,) = llm.generate(prompt, greedy_params(10), use_tqdm=False)
    assert output["token_ids"] != generate_by_reference(NAME, prompt, 10)
