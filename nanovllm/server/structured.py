"""From `response_format` and `structured_outputs` to what the answer must be."""

from typing import Any

from nanovllm.sampling_params import StructuredOutputs
from nanovllm.server.errors import bad_request, refuse

KINDS = ("json", "regex", "choice", "grammar", "json_object")


def constraint(response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None) -> dict[str, Any]:
    """The one kind asked for with its value, as keyword arguments of `StructuredOutputs`; empty for none."""
    by_format = _of_format(response_format)
    by_extra = {kind: value for kind, value in (structured_outputs or {}).items() if value is not None}
    for kind in by_extra:
        if kind not in KINDS:
            raise refuse("structured_outputs", f"{kind!r} is not done by this server; known are {', '.join(KINDS)}")
    if by_extra.get("json_object") is False:
        del by_extra["json_object"]
    if len(by_extra) > 1 or (by_extra and by_format):
        raise refuse("structured_outputs", "more than one kind of output is asked for; ask for one")
    return by_format or by_extra


def _of_format(response_format: dict[str, Any] | None) -> dict[str, Any]:
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
        case {"type": "json_schema"}:
            raise refuse("response_format", "json_schema needs {'json_schema': {'name': ..., 'schema': {...}}}")
    raise refuse("response_format", "type must be text, json_object or json_schema")


def structured_outputs(constraint: dict[str, Any]) -> StructuredOutputs | None:
    """The `StructuredOutputs` for SamplingParams; None where nothing is asked for."""
    if not constraint:
        return None
    try:
        return StructuredOutputs(**constraint)
    except ValueError as error:
        raise bad_request(error) from None
