"""Command-line options made from the fields of a dataclass.

The field's name gives the option's name, its type says how the value is read, and its metadata holds the help text
(`nanovllm.option`). An option that is not on the command line is not passed to the dataclass, which has the defaults.
"""

import argparse
import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from types import MappingProxyType, NoneType
from typing import Any, get_args, get_type_hints

from nanovllm.bench.arguments import json_object
from nanovllm.cli.parser import Parser
from nanovllm.config import Config
from nanovllm.errors import ConfigError
from nanovllm.option_names import OPTION_ALIASES, replace_aliases
from nanovllm.sampling_params import SamplingParams

# The fields that matter for one printed answer. `seed` is an engine option, which is used for the request too.
SAMPLING_FIELDS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "min_tokens", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}  # powers of two
METAVARS = {int: "N", float: "X", str: "NAME"}


# --- engine options ---------------------------------------------------------------------------------------------------


def add_engine_options(parser: Parser) -> None:
    names = [field.name for field in fields(Config)]
    add_fields(parser.add_argument_group("engine options"), Config, names, {}, aliases=OPTION_ALIASES)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Config` that are on the command line, as keyword arguments of `LLM`.

    They are checked here, before anything heavy is loaded.
    """
    try:
        options = replace_aliases(chosen_fields(args, Config))
        Config.from_options(options.get("model"), {name: options[name] for name in options if name != "model"})
    except ConfigError as error:
        args.parser.error(str(error))
    return options


# --- sampling options -------------------------------------------------------------------------------------------------


def add_sampling_options(parser: Parser, defaults: Mapping[str, Any]) -> None:
    """Add options for `SamplingParams`; `defaults` are this command's own defaults."""
    group = parser.add_argument_group("sampling options")
    add_fields(group, SamplingParams, SAMPLING_FIELDS, defaults)
    group.add_argument(
        "--chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help="Variables for the model's chat template, such as '{\"enable_thinking\": false}'.",
    )


def sampling_params(args: argparse.Namespace, defaults: Mapping[str, Any]) -> SamplingParams:
    parser: Parser = args.parser
    chosen = {**defaults, "seed": chosen_fields(args, Config).get("seed"), **chosen_fields(args, SamplingParams)}
    try:
        return SamplingParams(**chosen)
    except ValueError as error:
        parser.error(str(error))


# --- fields to options and back ---------------------------------------------------------------------------------------


def add_fields(
    group: argparse._ArgumentGroup,
    cls: type,
    names: Collection[str],
    defaults: Mapping[str, Any],
    *,
    aliases: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add the fields `names` of the dataclass `cls` as options.

    `defaults` are the values that the help shows where they differ from the dataclass's. `aliases` maps further
    spellings, which the help does not list, to field names.
    """
    hints = get_type_hints(cls)
    for field in fields(cls):
        if field.name in names:
            shown = _help(field.metadata["help"], defaults.get(field.name, field.default))
            spellings = {field.name: shown} | {
                alias: argparse.SUPPRESS for alias in aliases if aliases[alias] == field.name
            }
            for spelling, help in spellings.items():
                group.add_argument(
                    "--" + spelling.replace("_", "-"),
                    dest=_dest(cls, spelling),
                    default=argparse.SUPPRESS,
                    help=help,
                    **_parsing(field.name, hints[field.name]),
                )


def _dest(cls: type, name: str) -> str:
    return f"{cls.__name__}.{name}"


def chosen_fields(args: argparse.Namespace, cls: type) -> dict[str, Any]:
    """The values that the command line gives for fields of `cls`, by the spelling that was used."""
    prefix = _dest(cls, "")
    return {dest.removeprefix(prefix): value for dest, value in vars(args).items() if dest.startswith(prefix)}


def _parsing(name: str, hint: Any) -> dict[str, Any]:
    """argparse keywords for a field type: `int`, `float | None`, `bool`, `str | Sequence[str] | None`, ..."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if kinds[0] is bool:
        return {"action": argparse.BooleanOptionalAction}
    if len(kinds) > 1:
        return {"action": "append", "metavar": "TEXT"}
    kind = _size if name.endswith("_bytes") else kinds[0]
    return {"type": kind, "metavar": METAVARS[kinds[0]]}


def _help(sentences: str, default: Any) -> str:
    unset = default is None or default == ()
    return (sentences if unset else f"{sentences} Default: {default}.").replace("%", "%%")


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d[\d_]*)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes; write 1073741824, 1G or 1GiB")
    return int(match[1]) << UNITS[match[2].upper()]
