"""Each logits processor equals a plain loop over rows and tokens, for a batch of different rows."""

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from nanovllm.plan import NewRow
from nanovllm.runner.logits import KnownTokens, build_processors
from nanovllm.runner.sampling import is_processed
from nanovllm.sampling_params import SamplingParams

VOCAB_SIZE = 12
NEVER = float("-inf")
CPU = torch.device("cpu")

# prompt and generated tokens of the rows of a batch
TEXTS: list[tuple[list[int], list[int]]] = [
    ([1, 2, 3], [4, 4, 5]),
    ([7], []),
    ([0, 0, 9, 9, 9], [2, 3]),
    ([5, 6], [5, 6, 5, 1, 1]),
]


def apply_stages(
    settings: list[dict[str, Any]],
    *,
    stop_token_ids: tuple[int, ...] = (),
    bad_words: list[tuple[tuple[int, ...], ...]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of the rows before and after the logits processors."""
    rows = [
        NewRow(
            row=index + 1,
            token_ids=(*prompt, *generated),
            num_prompt_tokens=len(prompt),
            block_tables=((0,),),
            params=SamplingParams(**chosen),
            seed=0,
            stop_token_ids=stop_token_ids,
            bad_words=bad_words[index] if bad_words else (),
        )
        for index, ((prompt, generated), chosen) in enumerate(zip(TEXTS, settings, strict=True))
    ]
    token_ids = torch.full((len(rows), 10), 11)  # after a row's tokens are old tokens of another request
    for index, row in enumerate(rows):
        token_ids[index, : len(row.token_ids)] = torch.tensor(row.token_ids)
    before = torch.randn(len(rows), VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
    after = before.clone()
    given = KnownTokens(
        token_ids=token_ids,
        length=torch.tensor([len(row.token_ids) for row in rows]),
        num_prompt_tokens=torch.tensor([row.num_prompt_tokens for row in rows]),
    )
    stages = build_processors(rows, VOCAB_SIZE, CPU)
    assert all(is_processed(row) for row in rows if build_processors([row], VOCAB_SIZE, CPU))
    for stage in stages:
        stage.apply(after, given)
    return before, after


def test_a_batch_that_asks_for_nothing_has_no_stages() -> None:
    row = NewRow(1, (1, 2), 2, (0,), SamplingParams(min_tokens=3), 0, (), ())
    assert build_processors([row], VOCAB_SIZE, CPU) == []


def test_allowed_token_ids() -> None:
    before, after = apply_stages([{}, {"allowed_token_ids": [3, 5]}, {}, {"allowed_token_ids": [0]}])
    for index, allowed in enumerate([range(12), (3, 5), range(12), (0,)]):
        wanted = [before[index, token].item() if token in allowed else NEVER for token in range(12)]
        assert after[index].tolist() == wanted


def test_logit_bias() -> None:
    before, after = apply_stages([{"logit_bias": {2: 1.5, 7: -100}}, {}, {"logit_bias": {2: -3}}, {}])
    wanted = before.clone()
    wanted[0, 2] += 1.5
    wanted[0, 7] -= 100
    wanted[2, 2] -= 3
    assert torch.equal(after, wanted)


@pytest.mark.parametrize("min_tokens", range(1, 7))
def test_min_tokens(min_tokens: int) -> None:
    before, after = apply_stages(
        [{"min_tokens": min_tokens}, {}, {"min_tokens": min_tokens}, {}], stop_token_ids=(2, 8)
    )
    wanted = before.clone()
    for index in (0, 2):
        if len(TEXTS[index][1]) < min_tokens:
            wanted[index, [2, 8]] = NEVER
    assert torch.equal(after, wanted)


BAD_WORDS: list[tuple[tuple[int, ...], ...]] = [
    ((6,), (4, 5, 7), (5, 6), (3, 4, 4, 5, 8)),  # the last one begins in the prompt, so it does not count
    ((7, 3), (4,)),
    ((1, 2, 3, 10), (2, 3, 10), (10,), (3, 2), (9, 10)),  # several end in the same token
    ((6, 5, 1, 1, 0), (1, 1, 1), (5, 1, 2)),
]


def test_bad_words() -> None:
    before, after = apply_stages([{}] * 4, bad_words=BAD_WORDS)
    wanted = before.clone()
    for index, (_, generated) in enumerate(TEXTS):
        for word in BAD_WORDS[index]:
            head = list(word[:-1])
            if len(generated) >= len(head) and generated[len(generated) - len(head) :] == head:
                wanted[index, word[-1]] = NEVER
    assert torch.equal(after, wanted)
    assert (wanted == NEVER).sum(dim=1).tolist() == [2, 1, 2, 2]


PENALTIES: list[dict[str, Any]] = [
    {"presence_penalty": 0.7},
    {"frequency_penalty": -0.4, "repetition_penalty": 1.3},
    {"frequency_penalty": 0.9, "presence_penalty": -1.1, "repetition_penalty": 0.8},
    {},
    {"repetition_penalty": 2.0},
]


@pytest.mark.parametrize("shift", range(5))
def test_penalties(shift: int) -> None:
    settings = (PENALTIES[shift:] + PENALTIES[:shift])[:4]
    before, after = apply_stages(settings)
    wanted = before.clone()
    for index, (prompt, generated) in enumerate(TEXTS):
        chosen = settings[index]
        repetition = RepetitionPenaltyLogitsProcessor(chosen.get("repetition_penalty", 1.0))
        wanted[index] = repetition(torch.tensor([prompt + generated]), wanted[index : index + 1])[0]
        for token in range(VOCAB_SIZE):
            count = generated.count(token)
            wanted[index, token] -= chosen.get("frequency_penalty", 0.0) * count
            wanted[index, token] -= chosen.get("presence_penalty", 0.0) * (count > 0)
    torch.testing.assert_close(after, wanted)


def test_stages_work_together() -> None:
    """A masked token stays masked, whatever later processors add or multiply."""
    settings = {"allowed_token_ids": [2, 5], "logit_bias": {3: 100.0}, "repetition_penalty": 1.5, "min_tokens": 9}
    _, after = apply_stages([settings, {}, settings, {}], stop_token_ids=(5,))
    assert not after.isnan().any()
    assert [(row > NEVER).nonzero().flatten().tolist() for row in after[[0, 2]]] == [[2], [2]]
