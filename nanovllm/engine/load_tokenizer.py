"""Loads the tokenizer of a model: from its folder or GGUF file, or from another one that the user named."""

from pathlib import Path

from nanovllm.engine.text_params import TextParams
from nanovllm.models.registry import Description, describe
from nanovllm.text.tokenizer import Tokenizer
from nanovllm.utils.hub import resolve_model


def load_tokenizer(path: Path, description: Description, other: str | None) -> Tokenizer:
    """The tokenizer of a model folder or GGUF file, or of another one if the user named it."""
    if other is not None:
        path = Path(other) if Path(other).is_dir() else resolve_model(other)
        description = describe(path) if path.is_file() else description
    if path.is_dir():
        return Tokenizer.from_dir(path)
    from nanovllm.checkpoint.gguf_tokenizer import build_tokenizer, chat_template, special_tokens

    assert description.gguf_metadata is not None
    special = special_tokens(description.gguf_metadata)
    return Tokenizer(
        build_tokenizer(description.gguf_metadata),
        chat_template=chat_template(description.gguf_metadata),
        special_tokens={role: token for role, token in special.items() if isinstance(token, str)},
        add_bos_token=bool(special.get("add_bos_token")),
    )


def load_text_params(path: Path, description: Description, other: str | None) -> TextParams:
    """The tokenizer with what reads parameters that need it."""
    return TextParams(
        load_tokenizer(path, description, other),
        vocab_size=description.config.vocab_size,
        eos_token_ids=frozenset(description.config.eos_token_ids),
    )
