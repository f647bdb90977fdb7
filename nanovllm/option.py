"""Options: dataclass fields that carry a help text and a rule for their values. The command line reads them too."""

import math
import sys
from collections.abc import Callable
from dataclasses import field, fields
from typing import Any

Rule = Callable[[Any], str | None]  # says what the value must be, or None if it is that
MAX_VALUE_CHARS = 1000  # an error message shows at most this much of a value


def option(default: Any, help: str, rule: Rule | None = None) -> Any:
    """A field with this default. `help` says in whole sentences what the option does and in which unit it counts."""
    return field(default=default, metadata={"help": help, "rule": rule})


def check_options(options: Any, error: type[ValueError] = ValueError) -> None:
    """Raise `error` if a field of this dataclass breaks its rule. None is right where it is the default."""
    for each in fields(options):
        value, rule = getattr(options, each.name), each.metadata["rule"]
        if rule is not None and not (value is None and each.default is None):
            broken = rule(value)
            if broken is not None:
                refuse(each.name, value, broken, error)


def refuse(name: str, value: object, rule: str, error: type[ValueError] = ValueError) -> None:
    text = repr(value)
    raise error(f"{name}={text if len(text) <= MAX_VALUE_CHARS else text[:MAX_VALUE_CHARS] + '...'}: {rule}")


# --- rules ------------------------------------------------------------------------------------------------------------


def integer(low: int, high: int | None = None, *, also: tuple[Any, ...] = ()) -> Rule:
    """An integer in [low, high], or one of the values `also`."""
    text = f"must be an integer of at least {low}" + ("" if high is None else f" and at most {high}")

    def rule(value: Any) -> str | None:
        is_int = isinstance(value, int) and not isinstance(value, bool)
        right = (is_int and low <= value and (high is None or value <= high)) or value in also
        return None if right else text

    return rule


def number(low: float, high: float, *, open_low: bool = False, text: str = "") -> Rule:
    """A finite number in [low, high], or in (low, high]. `text` replaces the usual text of the rule."""
    span = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"

    def rule(value: Any) -> str | None:
        finite = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
        right = finite and (low < value if open_low else low <= value) and value <= high
        return None if right else text or f"must be a finite number in {span}"

    return rule


def of_type(kind: type, text: str = "") -> Rule:
    return lambda value: None if isinstance(value, kind) else f"must be {text or kind.__name__}"


def one_of(choices: tuple[str, ...]) -> Rule:
    def rule(value: Any) -> str | None:
        if value in choices:
            return None
        from nanovllm.option_names import nearest

        hint = f" (did you mean {near!r}?)" if (near := nearest(str(value), choices)) else ""
        return f"must be one of {', '.join(choices)}{hint}"

    return rule
