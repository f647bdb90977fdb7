"""A dataclass field that carries its help text. The command line reads its options from such fields."""

from dataclasses import Field, field
from typing import Any


def option(default: Any, help: str) -> Any:
    """A field with this default. `help` says in whole sentences what the option does and in which unit it counts."""
    return field(default=default, metadata={"help": help})


def option_help(field: "Field[Any]") -> str:
    """The help text of a field made by `option`."""
    return str(field.metadata["help"])
