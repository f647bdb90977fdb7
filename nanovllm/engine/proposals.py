"""Which sequences verify proposed tokens in the next step, and how many of them."""

from collections.abc import Sequence as Seq

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.proposer import Proposer
from nanovllm.engine.sequence import Sequence
from nanovllm.plan import NewBlocks, RowStep


class Proposals:
    def __init__(self, proposer: Proposer, block_manager: BlockManager, *, max_num_tokens: int) -> None:
        self._proposer = proposer
        self._block_manager = block_manager
        self._max_num_tokens = max_num_tokens  # of a step

    def choose(
        self, seqs: Seq[Sequence], new_blocks: list[NewBlocks]
    ) -> tuple[tuple[Sequence, ...], list[tuple[Sequence, RowStep]]]:
        """Ask for proposals for these sequences; returns those that simply decode, and the others with their steps.

        Their new blocks are added to `new_blocks`. A sequence whose row state is put back computes several known tokens
        and may have to wait for the budget.
        """
        decodes: list[Sequence] = []
        verified: list[tuple[Sequence, RowStep]] = []
        budget = self._max_num_tokens
        for num_done, seq in enumerate(seqs, 1):
            start = seq.num_tokens - 1 if seq.redo_from is None else seq.redo_from
            num_known = seq.num_tokens - start
            if num_known > budget:
                continue
            budget -= num_known
            room = min(budget - (len(seqs) - num_done), seq.max_num_tokens - seq.num_tokens - 1)  # and one is sampled
            proposed = tuple(self._proposer.propose(seq.token_ids, room)[:room]) if room > 0 else ()
            end, blocks = self._block_manager.extend(seq, seq.num_tokens + len(proposed))
            new_blocks += blocks
            proposed = proposed[: end - seq.num_tokens]
            budget -= len(proposed)
            if proposed or seq.was_verified:
                num_new = num_known + len(proposed)
                step = RowStep(seq.row, start, num_new, num_sampled=1 + len(proposed), proposed=proposed)
                verified.append((seq, step))
                seq.was_verified, seq.redo_from = bool(proposed), None
            else:
                decodes.append(seq)
        return tuple(decodes), verified
