"""Names of options: earlier spellings, which are still accepted, and suggestions for names that do not exist."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from nanovllm.errors import ConfigError

# Accepted by LLM(...), the command line, the Ray app and remote engines.
OPTION_ALIASES = {"kvcache_block_size": "kv_cache_block_size", "num_kvcache_blocks": "num_kv_cache_blocks"}


def replace_aliases(options: Mapping[str, Any]) -> dict[str, Any]:
    """The same options under their current names. Two spellings with different values are refused."""
    renamed: dict[str, Any] = {}
    for given, value in options.items():
        name = OPTION_ALIASES.get(given, given)
        if name in renamed and renamed[name] != value:
            spellings = [spelling for spelling in options if OPTION_ALIASES.get(spelling, spelling) == name]
            both = " and ".join(f"{spelling}={options[spelling]!r}" for spelling in spellings)
            raise ConfigError(f"{both}: two spellings of one option with different values; give {name} only")
        renamed[name] = value
    return renamed


def known_options(options: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The same options under their current names. A name that is not among `known` is refused."""
    options = replace_aliases(options)
    for name in options:
        if name not in known:
            near = nearest(name, known)
            hint = f"; did you mean {near!r}?" if near else f"; known options: {', '.join(known)}"
            raise ConfigError(f"unknown option {name!r}{hint}")
    return options


def nearest(name: str, known: Sequence[str]) -> str | None:
    """The known name that `name` resembles most, if any does."""
    return next(iter(difflib.get_close_matches(name, known, n=1)), None)
