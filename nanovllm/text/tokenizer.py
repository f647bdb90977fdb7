"""Convert text to token ids and back: a wrapper around `tokenizers.Tokenizer` with the model's chat template."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.checkpoint.json_file import read_json
from nanovllm.errors import CheckpointError, RequestError
from nanovllm.text.token_pieces import TokenPieces, read_rules

if TYPE_CHECKING:
    import tokenizers

    from nanovllm.text.chat_template import ChatTemplates, Message


class Tokenizer:
    """One model's tokenizer and chat template. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | Mapping[str, str] | None = None,  # one template, or a mapping of name to template
        special_tokens: Mapping[str, str] | None = None,  # "bos_token", "eos_token", ... -> the token's text
        add_bos_token: bool = False,  # prepend BOS here; only for a backend whose post-processor does not do it
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = self._named_id("bos_token")
        self.eos_token_id = self._named_id("eos_token")
        if add_bos_token and self.bos_token_id is None:
            raise CheckpointError(
                f"add_bos_token is set but bos_token={self.special_tokens.get('bos_token')!r} is not in the "
                "vocabulary; name a bos_token that is, or unset add_bos_token"
            )
        self._prefix = [self.bos_token_id] if add_bos_token and self.bos_token_id is not None else []
        # skip_special_tokens drops the added tokens that are marked special. all_special_ids also contains the tokens
        # that only have a role (bos_token, ...).
        skipped_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        named_ids = [backend.token_to_id(token) for token in self.special_tokens.values()]
        self.all_special_ids = skipped_ids.union(i for i in named_ids if i is not None)
        rules = read_rules(backend)
        self._pieces = TokenPieces(backend, rules, frozenset())
        self._pieces_without_special = TokenPieces(backend, rules, skipped_ids)
        self._chat_template = {"default": chat_template} if isinstance(chat_template, str) else chat_template

    @classmethod
    def from_dir(cls, path: str | Path) -> Tokenizer:
        """Read the tokenizer of a checkpoint folder as transformers does; it must have a tokenizer.json.

        As in transformers 5, the post-processor in tokenizer.json decides whether BOS is added, and `add_bos_token` of
        tokenizer_config.json is ignored.
        """
        folder = Path(path)
        backend = _load_backend(folder)
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:
            config |= _read_json(folder / "special_tokens_map.json")
        try:
            named, extra = _special_tokens(config)
            _add_missing_tokens(backend, config.get("added_tokens_decoder") or {}, [*named.values(), *extra])
            templates = _read_chat_templates(folder, config)
        except (AttributeError, KeyError, TypeError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"the tokenizer's settings in {str(folder)!r} are malformed: {error!r}; download the files again"
            ) from error
        return cls(backend, chat_template=templates, special_tokens=named)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, by default with the special tokens (such as BOS) that the model expects around it."""
        return self.encode_batch([text], add_special_tokens)[0]

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        for text in texts:
            _check_text(text)
        # Unlike `backend.encode`, this releases the GIL: encoding a text of several megabytes takes seconds.
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        prefix = self._prefix if add_special_tokens else []
        return [prefix + encoding.ids for encoding in encodings]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        try:
            return self.backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        except (OverflowError, TypeError) as error:
            raise RequestError(f"token_ids must be integers from 0 to {self.vocab_size - 1}: {error}") from None

    def decode_token(self, token_id: int) -> str:
        """The text of a single token, special or not, as it is shown in logprobs."""
        return self.decode([token_id], skip_special_tokens=False)

    def id_to_token(self, token_id: int) -> str | None:
        """The token as spelled in the vocabulary ("Ġhello", "▁hello"); None if no token has this id."""
        return self.backend.id_to_token(token_id) if token_id >= 0 else None

    def pieces(self, skip_special_tokens: bool) -> TokenPieces:
        """The bytes that each token adds to a text; none for special tokens if they are skipped."""
        return self._pieces_without_special if skip_special_tokens else self._pieces

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> str:
        """Render a conversation with the model's chat template, with the result of transformers' apply_chat_template.

        `template_kwargs` are further variables of the template. With `continue_final_message` the text ends inside the
        last message, so that the model continues it.
        """
        from nanovllm.text.chat_template import render_conversation

        return render_conversation(
            self._chat,
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables={**self.special_tokens, **template_kwargs},
        )

    @property
    def chat_templates(self) -> dict[str, str]:
        """The chat templates by name; a model with only one has "default"."""
        return dict(self._chat_template or {})

    def chat_template_has(self, text: str) -> bool:
        """Whether a chat template contains this text, such as the tag of a tool call."""
        return any(text in template for template in (self._chat_template or {}).values())

    @cached_property
    def _chat(self) -> ChatTemplates:
        from nanovllm.text.chat_template import ChatTemplates

        return ChatTemplates(self._chat_template)

    def encode_chat(self, messages: Sequence[Message], **kwargs: Any) -> list[int]:
        """Token ids of `render_chat`. No special tokens are added, because the template writes them."""
        return self.encode(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


# ---- reading and checking input ----


def _check_text(text: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"a prompt's text must be a str, not {type(text).__name__}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the text is not valid Unicode: character {error.start} is the lone surrogate "
            f"U+{ord(text[error.start]):04X}; decode the input as UTF-8 with errors='replace'"
        ) from None


def _load_backend(folder: Path) -> tokenizers.Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = folder / "tokenizer.json"
    if not file.is_file():
        others = [name for name in ("tokenizer.model", "vocab.json", "tekken.json") if (folder / name).exists()]
        found = f", found {', '.join(others)} instead" if others else ""
        raise CheckpointError(
            f"looked for tokenizer.json in {str(folder)!r}{found}; only fast tokenizers are supported: "
            "save one with transformers' AutoTokenizer.save_pretrained, or use token ids with skip_tokenizer_init=True"
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{str(file)!r} is not a readable tokenizer: {error}; download it again") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if the file does not exist."""
    return read_json(file) if file.is_file() else {}


def _special_tokens(config: Mapping[str, Any]) -> tuple[dict[str, str], list[str]]:
    """The special tokens with a role as {role: text} (bos_token, ...), and the texts of those without a role."""
    named = {key: text for key, value in config.items() if key.endswith("_token") and (text := _token_text(value))}
    others = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(others, Mapping):
        named |= {key: text for key, value in others.items() if (text := _token_text(value))}
        others = []
    return named, [text for value in others if (text := _token_text(value))]


def _token_text(value: Any) -> str | None:
    """The text of a token, written as a string or as {"content": text, ...}; None for a flag such as add_bos_token."""
    text = value.get("content") if isinstance(value, Mapping) else value
    return text if isinstance(text, str) else None


def _add_missing_tokens(
    backend: tokenizers.Tokenizer, by_id: Mapping[str, Mapping[str, Any]], special: Iterable[str]
) -> None:
    """Add the tokens of tokenizer_config.json (`by_id`, `special`) that tokenizer.json does not have."""
    from tokenizers import AddedToken

    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    missing = {
        token["content"]: AddedToken(**token)
        for _, token in sorted(by_id.items(), key=lambda item: int(item[0]))
        if token["content"] not in known
    }
    for text in special:
        if text not in known:
            missing.setdefault(text, AddedToken(text, special=True)).special = True
    backend.add_tokens(list(missing.values()))


def _read_chat_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: from *.jinja files, else from tokenizer_config.json, else from chat_template.json."""
    templates = {file.stem: file for file in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        templates["default"] = folder / "chat_template.jinja"
    if templates:
        return {name: file.read_text(encoding="utf-8") for name, file in templates.items()}
    content = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(content, list):
        return {item["name"]: item["template"] for item in content}
    return {"default": content} if isinstance(content, str) else {}
