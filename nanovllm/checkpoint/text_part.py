"""The tensors of the text model in a checkpoint that has a vision tower as well."""

import re
from collections.abc import Iterable, Iterator

from nanovllm.checkpoint.stored import Stored
from nanovllm.utils.logging import get_logger

NAMES = (  # of the text model in such files, and without the other parts
    (re.compile(r"^language_model\.(model|lm_head)(?=\.|$)"), r"\1"),
    (re.compile(r"^model\.language_model(?=\.|$)"), "model"),
)
OTHER_PARTS = re.compile(
    r"^(?:model\.)?(vision_tower|vision_embedder|audio_tower|multi_modal_projector|embed_(?:vision|audio)|visual|mtp)\."
)


def text_name(name: str) -> str:
    """The name of a tensor or module in a checkpoint of the text model alone."""
    for pattern, own in NAMES:
        name = pattern.sub(own, name)
    return name


def text_tensors(tensors: Iterable[tuple[str, Stored]], *, source: str) -> Iterator[tuple[str, Stored]]:
    """(name, tensor) of the text model. What is skipped is logged."""
    skipped: dict[str, int] = {}
    for name, tensor in tensors:
        other = OTHER_PARTS.match(name)
        if other is None:
            yield text_name(name), tensor
        else:
            skipped[other[1]] = skipped.get(other[1], 0) + 1
    if skipped:
        parts = ", ".join(f"{part} ({count} tensors)" for part, count in skipped.items())
        get_logger(__name__).warning(f"{source}: only text is implemented; not loaded: {parts}")
