"""An argument parser that reports a mistake in one line and suggests the nearest known name."""

import argparse
import difflib
import sys
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from _typeshed import SupportsWrite


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # No abbreviations: a new option could make them ambiguous.
        super().__init__(allow_abbrev=False, **settings)
        self.set_defaults(parser=self)  # the innermost subparser is the last to set it

    def _print_message(self, message: str, file: "SupportsWrite[str] | None" = None) -> None:
        """Raise if the pipe is closed: argparse would ignore it, and a command that failed would report success."""
        (sys.stderr if file is None else file).write(message)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def refuse_unknown(self, arguments: list[str]) -> NoReturn:
        first = arguments[0]
        if not first.startswith("-"):
            self.error(f"unexpected argument {first!r}: put a text of several words in quotes")
        name = first.split("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"'{self.prog} --help' lists them all"
        self.error(f"unknown option {name}; {hint}")
