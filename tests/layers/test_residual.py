"""What kernels that add up the residual stream themselves get of it."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from nanovllm.kernels.linear import fp8_some_rows, run
from nanovllm.layers.residual import Residual
from nanovllm.layers.split_k_residual import SplitKResidual


@pytest.mark.parametrize("kind", [Residual, SplitKResidual])
def test_a_norm_before_a_linear_takes_either_stream(kind: type[Residual], monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Mock()
    monkeypatch.setattr(fp8_some_rows, "fp8_some_rows_linear", launched)
    rows, norm = torch.ones(2, 4), SimpleNamespace(weight=torch.ones(4), eps=1e-6, fuses=True)
    stream = kind(rows)
    linear = run.runner("fp8_some_rows", {}, None, pdl=False)
    linear(stream, norm=norm)
    assert launched.call_args.args[0] is rows and launched.call_args.kwargs["partial_sums"] is None
    if isinstance(stream, SplitKResidual):
        sums = torch.ones(3, 2, 4)
        stream.add_later(sums)
        linear(stream, norm=norm)
        assert launched.call_args.kwargs["partial_sums"] is sums
        assert stream.take()[1] is None, "they are added once"
