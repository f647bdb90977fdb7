"""What an engine does on a GPU while nobody waits; the graphs are tested in tests/test_gpu.py."""

import pytest
import torch

from nanovllm.runner import idle_work
from tests.helpers import open_llm


def test_sizes_are_close_to_each_other_and_the_largest_comes_first() -> None:
    sizes = idle_work.sizes_to_try(64, 16_900)
    assert sizes == sorted(set(sizes), reverse=True) and sizes[0] == 16_900 and sizes[-1] == 64
    assert {1024, 2048, 4096} <= set(sizes) and len(sizes) < 350
    assert idle_work.sizes_to_try(64, 20) == [20]


def test_each_shape_of_weights_is_multiplied_with_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_llm("qwen3", cpu_kernels="torch") as llm:
        model = llm.llm_engine._core.executor.model
        hidden = model.spec.hidden_size
        shapes = {tuple(weight.shape) for weight in idle_work.dense_weights(model)}
        down = model.layers[0].feed_forward.down_proj.weight.shape
        assert down in shapes and len(shapes) == len(idle_work.dense_weights(model))
        products: list[tuple[tuple[int, ...], int, bool]] = []
        multiply = idle_work.multiply

        def record(weight: torch.Tensor, num_rows: int, *, adds: bool) -> None:
            products.append((tuple(weight.shape), num_rows, adds))
            multiply(weight, num_rows, adds=adds)

        monkeypatch.setattr(idle_work, "multiply", record)
        assert len(list(idle_work.idle_work(model, None, None, [], max_num_tokens=100))) == 4
        assert set(products) == {(shape, size, shape[0] == hidden) for shape in shapes for size in (64, 80, 96, 100)}
