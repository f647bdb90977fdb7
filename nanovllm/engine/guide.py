"""What the scheduler asks of a guide, which limits the next token of a completion."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.scheduler import Scheduler


class Guide(Protocol):
    """Decides which tokens may come next in a completion: it must follow a grammar, or its reasoning is limited.

    A mask has one bit per token, low bits first.
    """

    @property
    def is_over(self) -> bool:
        """Whether all tokens are allowed from here on, so that the completion needs no guide any more."""
        ...

    @property
    def num_tokens(self) -> int:
        """How many tokens of the completion it has followed."""
        ...

    def mask_after(self, new_tokens: Seq[int]) -> bytes | None:
        """Follow these tokens and return the mask of the next one; None if the grammar cannot be followed further."""
        ...

    def masks_after_proposed(self, proposed: Seq[int]) -> list[bytes]:
        """Return the masks after each of these tokens in turn, as far as the grammar allows them, without following
        them."""
        ...


def step_masks(scheduler: "Scheduler") -> tuple[dict[int, list[bytes]], list[Sequence]]:
    """Return the masks of the step launched last, and the sequences that ended because their guide gave up.

    Must be called when the results of all earlier steps are in. By row, a mask for each sampled position. A
    verification has fewer masks if the grammar refuses a proposed token: no token is kept after such a position. A
    sequence that has ended needs no mask.
    """
    step = scheduler.in_flight[-1]
    guided = set(step.plan.guided_rows)
    proposed = {row.seq: row.step.proposed for row in step.rows if row.step.proposed}
    seqs = [seq for seq in scheduler.decoding if seq.row in guided]
    masks, given_up = _masks_of(seqs, proposed)
    scheduler.num_masks.update({seq: len(masks[seq.row]) for seq in proposed if seq.row in masks})
    for seq in given_up:
        scheduler.finish(seq, "error")
    for seq in seqs:
        if seq.guide is not None and seq.guide.is_over:
            scheduler.drop_guide(seq)
    return masks, given_up


def _masks_of(
    seqs: Iterable[Sequence], proposed: Mapping[Sequence, tuple[int, ...]]
) -> tuple[dict[int, list[bytes]], list[Sequence]]:
    """By row, the masks of guided sequences; and the sequences whose guide gave up.

    A sequence that verifies `proposed` tokens has further masks, as far as the grammar allows those tokens.
    """
    masks: dict[int, list[bytes]] = {}
    given_up: list[Sequence] = []
    for seq in seqs:
        assert seq.guide is not None
        mask = seq.guide.mask_after(seq.token_ids[seq.num_prompt_tokens + seq.guide.num_tokens :])
        if mask is None:
            given_up.append(seq)
        else:
            masks[seq.row] = [mask]
            if seq in proposed:
                masks[seq.row] += seq.guide.masks_after_proposed(proposed[seq])
    return masks, given_up
