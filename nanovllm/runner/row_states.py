"""The state per row of all layers of a rank, its checkpoints, and copies to go back to before a verification."""

from collections.abc import Sequence

import torch
from torch import Tensor

from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.plan import StepPlan
from nanovllm.row_state import ALIGNMENT, RowState, num_checkpoints, num_states
from nanovllm.state import LayerState

GIB = 2**30


class RowStates:
    """A row's states of all layers lie side by side, so that one copy moves them.

    Keys and values of rejected tokens are overwritten later; a state per row has to be put back: if a verified token
    was rejected, the next step of the row starts where the verification started.
    """

    def __init__(self, states: Sequence[LayerState], config: Config, *, device: torch.device) -> None:
        """`states`: of the layers of this rank."""
        own = [state for state in states if isinstance(state, RowState)]
        row_bytes, max_num_seqs = sum(state.bytes_per_row for state in own), config.max_num_seqs
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later is free
            check_room(row_bytes, config, num_bytes=torch.cuda.mem_get_info(device)[0])
        size = row_bytes // ALIGNMENT, ALIGNMENT // 8
        self._rows = torch.zeros((max_num_seqs + 1, *size), dtype=torch.int64, device=device)
        self._checkpoints = torch.empty((num_checkpoints(config), *size), dtype=torch.int64, device=device)
        self._before: dict[int, tuple[int, Tensor]] = {}  # by row: a verification's start, and the states before it
        self.layers: list[Tensor] = []  # [max_num_seqs + 1, *shape] of each layer that keeps one
        begin = 0
        for state in own:
            end = begin + state.bytes_per_row // ALIGNMENT
            numbers = self._rows[:, begin:end].flatten(1).view(getattr(torch, state.dtype))
            self.layers.append(numbers[:, : state.size].unflatten(1, state.shape))
            begin = end

    def apply(self, plan: StepPlan) -> None:
        """Before a step runs: copy rows to checkpoints and back, put rows back that start again, and copy those of rows
        to be verified."""
        for row, checkpoint, restores in plan.state_copies:
            if restores:
                self._rows[row].copy_(self._checkpoints[checkpoint])
            else:
                self._checkpoints[checkpoint].copy_(self._rows[row])
        for new in plan.new_rows:
            self._before.pop(new.row, None)
        for step in plan.row_steps:
            start, before = self._before.pop(step.row, (-1, None))
            if before is not None and start == step.start:
                self._rows[step.row].copy_(before)
            if step.proposed:
                self._before[step.row] = step.start, self._rows[step.row].clone()


def check_room(row_bytes: int, config: Config, *, num_bytes: int) -> None:
    """Refuse states that do not fit into `num_bytes`. `row_bytes`: of one sequence."""
    total = row_bytes * num_states(config)
    if total <= num_bytes:
        return
    raise ConfigError(
        f"no memory for the states of max_num_seqs={config.max_num_seqs} sequences: one takes "
        f"{row_bytes / 2**20:.2f} MiB, and with {num_checkpoints(config)} checkpoints of the prefix cache all take "
        f"{total / GIB:.2f} GiB, more than {num_bytes / GIB:.2f}; lower max_num_seqs to at most "
        f"{num_bytes * config.max_num_seqs // total}"
    )
