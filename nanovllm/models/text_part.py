"""The config of a text model inside that of a model with a vision tower; no torch."""

from typing import Any

from nanovllm.errors import CheckpointError


def text_part(raw: dict[str, Any], *, known: tuple[str, ...]) -> dict[str, Any]:
    """`raw` with the values of its text_config, if it has one, whose model_type must be one of `known`.

    The tensors of such a checkpoint are found by checkpoint/text_part.py.
    """
    text = raw.get("text_config")
    if text is None:
        return raw
    if text.get("model_type") not in known:
        kinds = ", ".join(known)
        raise CheckpointError(f"config: text_config: model_type={text.get('model_type')!r}; known here: {kinds}")
    whole = {name: raw[name] for name in ("architectures", "eos_token_id") if raw.get(name) is not None}
    return raw | text | whole
