"""Makes the spec of a special kind of layer from a plain one; no torch."""

from dataclasses import fields
from typing import Any, TypeVar

Kind = TypeVar("Kind")


def refine(kind: type[Kind], spec: Any, **changes: Any) -> Kind:
    """A spec of the subclass `kind` with the fields of `spec`, except for `changes`."""
    return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)} | changes)
