"""`LLM.beam_search` against a plain beam search with transformers' logprobs."""

from collections.abc import Iterator

import pytest

from nanovllm import LLM, BeamSearchParams, RequestOutput
from tests.helpers import copy_of, edit_config, open_llm, prompt_of, reference_logprobs
from tests.llm.support import TEXT, encode

Beam = tuple[list[int], float]


def plain_beam_search(prompt: list[int], params: BeamSearchParams, eos: set[int]) -> list[Beam]:
    """Beam search by vLLM's rules with transformers' logprobs: tokens and cumulative logprob of the best beams."""
    eos = set() if params.ignore_eos else eos

    def score(beam: Beam) -> float:
        length = len(beam[0]) - (beam[0][-1] in eos)
        return beam[1] / length**params.length_penalty

    live: list[Beam] = [(prompt, 0.0)]
    done: list[Beam] = []
    for _ in range(params.max_tokens):
        children = []
        for tokens, total in live:
            best = reference_logprobs("llama", tokens)[-1].topk(2 * params.beam_width)
            scored = zip(best.indices.tolist(), best.values.tolist(), strict=True)
            children += [([*tokens, token], total + logprob) for token, logprob in scored]
        done += [child for child in children if child[0][-1] in eos]
        going = [child for child in children if child[0][-1] not in eos]
        live = sorted(going, key=score, reverse=True)[: params.beam_width]
    return sorted(done + live, key=score, reverse=True)[: params.beam_width]


@pytest.fixture(scope="module")
def beam_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model with 20 end tokens, so that some beams end."""
    folder = copy_of("llama", tmp_path_factory.mktemp("beams"))
    edit_config(folder, lambda config: config.update(eos_token_id=list(range(20))))
    with open_llm(folder, max_num_seqs=16) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        BeamSearchParams(beam_width=1, max_tokens=5, ignore_eos=True),
        BeamSearchParams(beam_width=3, max_tokens=8),
        BeamSearchParams(beam_width=4, max_tokens=6, ignore_eos=True),
        BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=0.0),
        BeamSearchParams(beam_width=4, max_tokens=6, length_penalty=-1.5),
    ],
    ids=str,
)
def test_beam_search(beam_llm: LLM, params: BeamSearchParams) -> None:
    prompts = [prompt_of(2), prompt_of(30)]  # with the short one the length penalty matters
    reasons = set()
    for prompt, output in zip(prompts, beam_llm.beam_search(prompts, params), strict=True):
        expected = plain_beam_search(prompt, params, set(range(20)))
        assert [beam.tokens for beam in output.sequences] == [tokens for tokens, _ in expected]
        for beam, (tokens, total) in zip(output.sequences, expected, strict=True):
            assert beam.cum_logprob == pytest.approx(total, abs=1e-4)
            by_eos = tokens[-1] < 20 and not params.ignore_eos
            assert (beam.finish_reason, beam.stop_reason) == (("stop", tokens[-1]) if by_eos else ("length", None))
            reasons.add(beam.finish_reason)
    assert "length" in reasons if params.ignore_eos else "stop" in reasons
    assert beam_llm.is_finished()


def test_a_beam_of_one_is_greedy(llm: LLM, free: RequestOutput) -> None:
    (output,) = llm.beam_search(TEXT, BeamSearchParams(beam_width=1, max_tokens=12, ignore_eos=True))
    (beam,) = output.sequences
    assert beam.tokens == encode(llm, TEXT) + free["token_ids"][:12]
    assert beam.text == llm.tokenizer.decode(free["token_ids"][:12])  # type: ignore[union-attr]
