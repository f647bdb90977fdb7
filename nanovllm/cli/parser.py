"""An argument parser that tells a mistake in one line, with the nearest name that exists."""

import argparse
import difflib
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        # An abbreviation that names one option today may name two tomorrow.
        super().__init__(allow_abbrev=False, **settings)
        self.set_defaults(parser=self)  # the innermost parser that took part ends up in the namespace

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def refuse_unknown(self, arguments: list[str]) -> NoReturn:
        first = arguments[0]
        if not first.startswith("-"):
            self.error(f"unexpected argument {first!r}: a text of several words needs quotes")
        name = first.split("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, n=1)
        hint = f"did you mean {near[0]}?" if near else f"'{self.prog} --help' lists them all"
        self.error(f"unknown option {name}; {hint}")
