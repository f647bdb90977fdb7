"""Close the objects of a JSON schema: where `properties` are listed, a model generates no other keys.

JSON Schema allows additional properties unless the schema forbids them, and a model would invent some until the length
limit. As in vLLM and in OpenAI's strict mode, an object with `properties` or `patternProperties` is closed unless the
schema has `additionalProperties`.

Parts of a schema that describe the same object (`allOf`, `anyOf`, `oneOf`, `$ref` and what stands beside them) are
closed together: each part also allows the properties that the others declare, with any value.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import RequestError
from nanovllm.structured.keywords import NOT_SCHEMAS, SCHEMAS_BY_NAME
from nanovllm.structured.references import local_target

_COMBINED = ("allOf", "anyOf", "oneOf")
_MAX_WORK = 200_000  # visited schemas and added properties; a schema of the largest size has 40,000 parts
_NOT_COPIED = ("$id", "$anchor", "$defs", "definitions")  # a copy of a schema must not have a second one of these


def close_objects(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of the schema in which objects with properties are closed unless they have additionalProperties."""
    try:
        return _Closer(schema).close_document()
    except RecursionError:
        raise RequestError("json: the schema's references are nested too deeply; simplify it") from None


@dataclass(frozen=True)
class _Declared:
    """The properties that a part of a schema declares. Names and patterns are dicts: the order of names is the order in
    which the properties are generated."""

    names: dict[str, None]
    patterns: dict[str, None]
    is_open: bool = False  # it allows additional properties explicitly
    is_closed: bool = False  # some of it will be closed


_NOTHING = _Declared({}, {})


def _union(parts: Iterable[_Declared]) -> _Declared:
    names: dict[str, None] = {}
    patterns: dict[str, None] = {}
    is_open = is_closed = False
    for part in parts:
        names |= part.names
        patterns |= part.patterns
        is_open = is_open or part.is_open
        is_closed = is_closed or part.is_closed
    return _Declared(names, patterns, is_open, is_closed)


def _is_closed(schema: dict[str, Any]) -> bool:
    """Whether the schema declares properties, even if it lists none, and does not mention additional ones."""
    declares = any(isinstance(schema.get(key), dict) for key in ("properties", "patternProperties"))
    return declares and "additionalProperties" not in schema


def _own(schema: dict[str, Any]) -> _Declared:
    """What the schema itself declares. A required property without a schema may have any value."""
    properties, patterns, required = (schema.get(key) for key in ("properties", "patternProperties", "required"))
    listed = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return _Declared(
        dict.fromkeys([*(properties if isinstance(properties, dict) else ()), *listed]),
        dict.fromkeys(patterns if isinstance(patterns, dict) else ()),
        schema.get("additionalProperties", False) is not False,
        _is_closed(schema),
    )


class _Closer:
    """Closes the objects of one document, which local references point into."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._document = document
        self._declared_by_ref: dict[str, _Declared] = {}
        self._copies: dict[tuple[Any, ...], str] = {}  # (reference, properties declared around it) -> new definition
        self._new_definitions: dict[str, Any] = {}
        definitions = document.get("$defs", {})
        self._definitions = definitions if isinstance(definitions, dict) else None
        self._prefix = "closed-"  # of the names of new definitions
        while any(name.startswith(self._prefix) for name in self._definitions or ()):
            self._prefix += "-"
        self._work_left = _MAX_WORK

    def close_document(self) -> dict[str, Any]:
        closed = self._close(self._document, _NOTHING)
        if self._new_definitions:
            closed["$defs"] = {**closed.get("$defs", {}), **self._new_definitions}
        return closed

    def _close(self, schema: Any, around: _Declared) -> Any:
        """Close a schema and all schemas inside it. `around` is declared for the same object outside of the schema."""
        if not isinstance(schema, dict):
            return schema
        parts = self._parts(schema)
        total = _union(parts.values())
        self._work(1 + len(parts) * len(total.names) + len(around.names))
        closed = {key: self._close_value(key, value) for key, value in schema.items() if key not in _COMBINED}
        for key in _COMBINED:
            if key in schema:
                closed[key] = self._close_branches(key, schema[key], parts, around)
        if "$ref" in schema and "$ref" in parts:
            closed["$ref"] = self._reference(schema["$ref"], _union([*_others(parts, "$ref"), around]))
        everything = _union([total, around])
        if _is_closed(schema) and not everything.is_open:
            _add_missing(closed, "properties", everything.names)
            _add_missing(closed, "patternProperties", everything.patterns)
            closed["additionalProperties"] = False
        return closed

    def _close_value(self, key: str, value: Any) -> Any:
        """Close the schemas in the value of a keyword whose schemas describe other values than the object itself."""
        if key in SCHEMAS_BY_NAME and isinstance(value, dict):
            return {name: self._close(each, _NOTHING) for name, each in value.items()}
        if key in NOT_SCHEMAS:
            return value
        if isinstance(value, list):
            return [self._close(each, _NOTHING) for each in value]
        return self._close(value, _NOTHING)

    def _close_branches(self, key: str, branches: Any, parts: dict[str, _Declared], around: _Declared) -> Any:
        if not isinstance(branches, list):
            return branches
        if key != "allOf":  # only one of the branches is generated
            outside = _union([*_others(parts, key), around])
            return [self._close(branch, outside) for branch in branches]
        return [
            self._close(branch, _union([*_others(parts, f"allOf {number}"), around]))
            for number, branch in enumerate(branches)
        ]

    # --- what parts of a schema declare -------------------------------------------------------------------------------

    def _parts(self, schema: dict[str, Any]) -> dict[str, _Declared]:
        """What each part of the schema declares for the object: the schema itself, its branches, its reference."""
        parts = {"itself": _own(schema)}
        if isinstance(schema.get("$ref"), str):
            parts["$ref"] = self._declared_by_reference(schema["$ref"])
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                parts[key] = _union(map(self._declared, schema[key]))
        if isinstance(schema.get("allOf"), list):
            for number, branch in enumerate(schema["allOf"]):
                parts[f"allOf {number}"] = self._declared(branch)
        return parts

    def _declared(self, schema: Any) -> _Declared:
        self._work(1)
        return _union(self._parts(schema).values()) if isinstance(schema, dict) else _NOTHING

    def _declared_by_reference(self, ref: str) -> _Declared:
        if ref not in self._declared_by_ref:
            self._declared_by_ref[ref] = _NOTHING  # for a reference that leads back to itself
            target = local_target(self._document, ref)
            # Unknown properties of an unknown target must not be refused.
            self._declared_by_ref[ref] = _Declared({}, {}, True) if target is None else self._declared(target)
        return self._declared_by_ref[ref]

    # --- references ---------------------------------------------------------------------------------------------------

    def _reference(self, ref: str, around: _Declared) -> str:
        """A reference to a schema that also allows what is declared around the reference."""
        if not self._declared_by_reference(ref).is_closed:
            return ref
        if not (around.names or around.patterns or around.is_open):
            return ref
        target = local_target(self._document, ref)
        if not isinstance(target, dict) or self._definitions is None:
            return ref
        key = (ref, tuple(sorted(around.names)), tuple(sorted(around.patterns)), around.is_open)
        if key not in self._copies:
            name = self._copies[key] = f"{self._prefix}{len(self._copies)}"
            own = {keyword: value for keyword, value in target.items() if keyword not in _NOT_COPIED}
            self._new_definitions[name] = self._close(own, around)
        return f"#/$defs/{self._copies[key]}"

    def _work(self, amount: int) -> None:
        self._work_left -= amount
        if self._work_left < 0:
            raise RequestError("json: the schema combines too many schemas and properties; simplify it")


def _others(parts: dict[str, _Declared], name: str) -> list[_Declared]:
    return [part for other, part in parts.items() if other != name]


def _add_missing(schema: dict[str, Any], key: str, names: Iterable[str]) -> None:
    """Allow these properties, or patterns of properties, with any value, where the schema does not mention them."""
    mentioned = schema.get(key, {})
    missing = [name for name in names if name not in mentioned]
    if missing and isinstance(mentioned, dict):
        schema[key] = {**mentioned, **dict.fromkeys(missing, True)}
