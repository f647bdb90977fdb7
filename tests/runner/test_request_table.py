"""The request table on the device holds what the plans contain, and the sampled tokens."""

from typing import TypeVar

import numpy as np
import pytest
import torch

from nanovllm import SamplingParams
from nanovllm.plan import NewBlocks, NewRow, StepPlan
from nanovllm.runner.kernel_table import KernelTable
from nanovllm.runner.request_table import RequestTable
from nanovllm.runner.upload import Upload
from tests.kernels.support import DEVICE

DEVICE_ = torch.device(DEVICE)
Table = TypeVar("Table", bound=RequestTable)


def make_table(kind: type[Table] = KernelTable) -> Table:
    upload = Upload(capacity=4, device=DEVICE_)
    return kind(max_num_seqs=3, max_model_len=40, block_size=16, upload=upload)


def new_row(row: int, tokens: range, params: SamplingParams, seed: int = 0) -> NewRow:
    return NewRow(
        row=row,
        token_ids=tuple(tokens),
        num_prompt_tokens=len(tokens),
        block_tables=((7, 8),),
        params=params,
        seed=seed,
        stop_token_ids=(),
        bad_words=(),
    )


def send(table: RequestTable, plan: StepPlan) -> None:
    table.apply(plan)
    assert table._writes
    table.send(lambda upload: None)
    assert not table._writes


def test_a_row_is_filled_and_filled_anew() -> None:
    table = make_table()
    sampling = table.sampling
    params = SamplingParams(temperature=0.5, top_k=9, top_p=0.25, min_p=0.125)
    send(table, StepPlan(new_rows=(new_row(2, range(100, 120), params, seed=-(2**62) + 5),)))
    assert table.tokens[2, :20].tolist() == list(range(100, 120))
    assert table.blocks[None][2].tolist() == [7, 8, 0]
    assert table.length.tolist() == [0, 0, 20, 0]
    assert table.host_length.tolist() == [0, 0, 20, 0]
    columns = [column[2].item() for column in (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p)]
    assert columns == [0.5, 9, 0.25, 0.125]
    halves = np.array([sampling.seed_low[2].item(), sampling.seed_high[2].item()], dtype=np.int32)
    assert halves.view(np.int64).item() == -(2**62) + 5

    send(table, StepPlan(new_rows=(new_row(2, range(5), SamplingParams(temperature=0.0)),)))
    assert table.tokens[2, :6].tolist() == [0, 1, 2, 3, 4, 105]  # old tokens after the length
    assert (table.length[2].item(), sampling.temperature[2].item(), sampling.top_k[2].item()) == (5, 0.0, 0)


@pytest.mark.parametrize("kind", [RequestTable, KernelTable])
def test_blocks_grow_and_tokens_are_appended(kind: type[RequestTable]) -> None:
    table = make_table(kind)
    send(table, StepPlan(new_rows=(new_row(1, range(9), SamplingParams()), new_row(3, range(4), SamplingParams()))))
    send(table, StepPlan(new_blocks=(NewBlocks(3, 2, (11,)), NewBlocks(1, 1, (12, 13)))))
    for blocks in (table.blocks[None], table.host_blocks[None]):
        assert blocks.tolist() == [[0, 0, 0], [7, 12, 13], [0, 0, 0], [7, 8, 11]]
    rows = torch.tensor([3, 1], dtype=torch.int32, device=DEVICE_)
    table.append(rows, torch.tensor([55, 66], device=DEVICE_))
    assert (table.tokens[3, 4].item(), table.tokens[1, 9].item()) == (55, 66)
    assert table.length.tolist() == [0, 10, 0, 5]


def test_who_decodes_is_padded_with_row_0() -> None:
    table = make_table()
    assert not table.has_changes
    table.set_decode_rows((3, 1), size=3)
    assert table.has_changes
    send(table, StepPlan())
    assert table.decode_rows.tolist() == [3, 1, 0]


def test_clearing_leaves_zeros() -> None:
    table = make_table()
    send(table, StepPlan(new_rows=(new_row(1, range(9), SamplingParams()),)))
    table.clear()
    assert not table.tokens.any() and not table.length.any() and not table.host_length.any()


def test_an_upload_grows_with_what_changed() -> None:
    upload = Upload(capacity=2, device=DEVICE_)
    for extra in (0, 5, 1):
        upload.start(extra=extra)
        views = [upload.add(np.arange(2) + extra), *([upload.add(np.full(extra, 9))] if extra else [])]
        upload.send()
        assert views[0].tolist() == [extra, extra + 1]
        assert all((view == 9).all() for view in views[1:])
