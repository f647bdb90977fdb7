import pytest

from nanovllm.runner.warm_up import largest_steps


@pytest.mark.parametrize(
    ("max_num_tokens", "max_num_seqs", "expected"),
    [
        (16896, 512, [16896, 4096, 2047, 257]),
        (16896, 300, [16800, 4096, 2047, 257]),
        (16896, 5000, [15000, 4096, 2047, 257]),
        (3000, 7, [2996, 2047, 257]),
        (100, 512, [100]),
    ],
)
def test_there_is_a_step_for_each_kind_of_linear(max_num_tokens: int, max_num_seqs: int, expected: list[int]) -> None:
    """Sequences of one step are of equal length, so that a few tokens may be left over."""
    steps = largest_steps(max_num_tokens=max_num_tokens, max_num_seqs=max_num_seqs, max_model_len=4096)
    assert [sum(chunk.num_new for chunk in step.row_steps) for step in steps] == expected
    for step in steps[1:]:  # few long sequences, whose attention has a kernel of its own
        assert len(step.row_steps) <= 2
