"""A limit on the tokens of reasoning: </think> comes when it is reached, and changes nothing before and after."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.consistency import check_scheduler
from nanovllm.engine.thinking import ThinkingBudget, thinking_tokens
from nanovllm.errors import RequestError
from nanovllm.sampling_params import StructuredOutputs
from nanovllm.text.tokenizer import Tokenizer
from tests.helpers import TEXT_MODEL, TOKENIZER, open_llm, prompt_of, scheduler_of

OPEN, CLOSE = 596, 597
BUDGETS = [0, 1, 2, 7, 16, 17, 30]
UNLIKELY = {CLOSE: -100.0, OPEN: -100.0, 2: -100.0, 0: -100.0}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(TOKENIZER)


def prompts() -> list[list[int]]:
    """Prompts of several lengths that end with <think>, some with whitespace after it."""
    newline = Tokenizer.from_dir(TOKENIZER).encode("\n", False)
    return [prompt_of(5 + 6 * index, seed=index) + [OPEN] + newline * (index % 2) for index in range(len(BUDGETS))]


def params(budget: int | None, **settings: Any) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, "logit_bias": UNLIKELY} | settings,
        thinking_token_budget=budget,
    )


def generate(llm: LLM, prompt: Sequence[list[int]], wanted: Any) -> list[list[int]]:
    outputs = llm.generate(list(prompt), wanted, use_tqdm=False)
    scheduler = scheduler_of(llm)
    check_scheduler(scheduler)
    assert scheduler._num_guided == 0
    return [list(part.token_ids) for output in outputs for part in output.outputs]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    """What the model says without a limit, cut at the limit, then </think>, then what the model says after that."""
    with open_llm(TEXT_MODEL, enable_prefix_caching=False) as llm:
        free = generate(llm, prompts(), params(None))
        assert not any(CLOSE in tokens for tokens in free)
        begun = [[*tokens[:budget], CLOSE] for tokens, budget in zip(free, BUDGETS, strict=True)]
        rests = generate(
            llm,
            [prompt + begin for prompt, begin in zip(prompts(), begun, strict=True)],
            [params(None, max_tokens=40 - len(begin)) for begin in begun],
        )
    return [begin + rest for begin, rest in zip(begun, rests, strict=True)]


class Oracle:
    """A proposer that knows how the texts continue; every third time its second token is wrong."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.num_asked = 0

    def propose(self, token_ids: Sequence[int], max_tokens: int) -> list[int]:
        self.num_asked += 1
        count = len(token_ids)
        text = next((text for text in self.texts if text[:count] == list(token_ids)), [])
        found = text[count : count + 3]
        if self.num_asked % 3 == 0:
            found = [token + 1 if index == 1 else token for index, token in enumerate(found)]
        return found[:max_tokens]


@pytest.mark.parametrize(
    "options",
    [
        {"overlap": False},
        {"overlap": True},
        {"overlap": True, "max_num_batched_tokens": 16},
        {"overlap": True, "num_kv_cache_blocks": 14},
        {"overlap": True, "max_num_seqs": 2},
    ],
    ids=str,
)
def test_the_tokens_are_exact(options: dict[str, Any], expected: list[list[int]]) -> None:
    with open_llm(TEXT_MODEL, **options) as llm:
        wanted = [params(budget) for budget in BUDGETS]
        assert generate(llm, prompts(), wanted) == expected
        if "num_kv_cache_blocks" in options:
            assert scheduler_of(llm).num_preemptions


@pytest.mark.parametrize("overlap", [False, True])
def test_with_proposed_tokens(overlap: bool, expected: list[list[int]]) -> None:
    """Also where the proposer goes on thinking: it knows the texts without a limit, too."""
    with open_llm(TEXT_MODEL) as llm:
        free = generate(llm, prompts(), params(None))
    texts = [prompt + text for one in (expected, free) for prompt, text in zip(prompts(), one, strict=True)]
    for known in (texts, texts[::-1]):
        proposer = Oracle(known)
        with open_llm(TEXT_MODEL, overlap=overlap, proposer=proposer) as llm:
            assert generate(llm, prompts(), [params(budget) for budget in BUDGETS]) == expected
        assert proposer.num_asked > 20


def test_several_completions_beside_grammars_and_plain_requests() -> None:
    """Sampled, in one batch with a grammar and an unlimited request, which stay as they are alone."""
    prompt = prompts()[3]
    grammar = SamplingParams(seed=4, max_tokens=30, structured_outputs=StructuredOutputs(regex="[a-f]{9}"))
    plain = params(None, temperature=1.0, seed=5)
    limited = params(6, temperature=1.0, seed=6, n=3)
    with open_llm(TEXT_MODEL, overlap=True) as llm:
        alone = generate(llm, [prompt, prompt], [grammar, plain])
        free = generate(llm, [prompt], params(None, temperature=1.0, seed=6, n=3))
        both = generate(llm, [prompt] * 3, [grammar, plain, limited])
    assert both[:2] == alone
    assert [tokens[:7] for tokens in both[2:]] == [[*tokens[:6], CLOSE] for tokens in free]
    assert all(len(tokens) == 40 for tokens in both[1:])


def test_a_model_that_opens_its_reasoning_itself(tokenizer: Tokenizer) -> None:
    blank, word = tokenizer.encode("\n", False)[0], tokenizer.encode("a", False)[0]
    with open_llm(TEXT_MODEL) as llm:
        (tokens,) = generate(llm, [prompt_of(9)], params(3, logit_bias={OPEN: 100.0, CLOSE: -100.0}))
        assert tokens[0] == OPEN and tokens.index(CLOSE) == 4
        (tokens,) = generate(llm, [prompt_of(9)], params(3))
        assert CLOSE not in tokens and len(tokens) == 40, "a completion without reasoning has no limit"
    guide = ThinkingBudget(thinking_tokens(tokenizer, 600), 2, [5, 6])
    assert allowed(guide.mask_after([blank, OPEN, blank])) == set(range(600)) and not guide.is_over
    assert guide.masks_after_proposed([word, word, word]) == [guide.mask_after([word])]
    assert allowed(guide.mask_after([])) == {CLOSE} and guide.num_tokens == 4
    assert len(guide.masks_after_proposed([CLOSE, word, OPEN, word, word])) == 5
    assert allowed(guide.mask_after([CLOSE])) == set(range(600)) and guide.is_over


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(8 * len(mask)) if mask[token // 8] >> token % 8 & 1}


@pytest.mark.parametrize(("begin", "end"), [("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>")])
def test_markers_of_other_models(begin: str, end: str, tmp_path: Path) -> None:
    """Mistral's and Gemma 4's."""
    for file in TOKENIZER.iterdir():
        text = file.read_text().replace("<think>", begin).replace("</think>", end)
        (tmp_path / file.name).write_text(text)
    tokens = thinking_tokens(Tokenizer.from_dir(tmp_path), 600)
    assert (tokens.open_id, tokens.close_id) == (OPEN, CLOSE)
    assert allowed(ThinkingBudget(tokens, 0, [5, OPEN]).mask_after([])) == {CLOSE}


def test_a_think_tag_in_the_middle_of_the_prompt_is_not_reasoning(tokenizer: Tokenizer) -> None:
    for prompt in ([5, OPEN, 6], [OPEN, 6, CLOSE, *tokenizer.encode("\n\n", False)], [5]):
        guide = ThinkingBudget(thinking_tokens(tokenizer, 600), 0, prompt)
        assert len(allowed(guide.mask_after([]))) == 600


def test_the_budget_goes_before_other_restrictions() -> None:
    with open_llm(TEXT_MODEL) as llm:
        (tokens,) = generate(llm, prompts()[:1], params(2, allowed_token_ids=[70, 71], bad_words=["</think>"]))
    assert tokens[2] == CLOSE and set(tokens) <= {70, 71, CLOSE}


def test_refusals() -> None:
    with pytest.raises(ValueError, match="thinking_token_budget"):
        SamplingParams(thinking_token_budget=-1)
    with open_llm("qwen3") as llm, pytest.raises(RequestError, match="^thinking_token_budget: .*tokenizer"):
        llm.generate([[1, 2]], SamplingParams(thinking_token_budget=1), use_tqdm=False)
    with pytest.raises(RequestError, match="^thinking_token_budget: .*</think>"):
        thinking_tokens(Tokenizer.from_dir(TOKENIZER), CLOSE)
