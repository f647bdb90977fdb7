"""Convert `response_format` and `structured_outputs` of a request to `StructuredOutputs`."""

from typing import Any

from nanovllm.sampling_params import StructuredOutputs
from nanovllm.server.errors import bad_request, refuse

KINDS = ("json", "regex", "choice", "grammar", "json_object")


def constraint(response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None) -> dict[str, Any]:
    """The keyword argument of `StructuredOutputs` that the request asks for; empty if there is none."""
    from_format = _from_response_format(response_format)
    from_extension = {kind: value for kind, value in (structured_outputs or {}).items() if value is not None}
    for kind in from_extension:
        if kind not in KINDS:
            raise refuse("structured_outputs", f"{kind!r} is not supported; supported are {', '.join(KINDS)}")
    if from_extension.get("json_object") is False:
        del from_extension["json_object"]
    if len(from_extension) > 1 or (from_extension and from_format):
        raise refuse("structured_outputs", "more than one kind of structured output is requested; request only one")
    return from_format or from_extension


def _from_response_format(response_format: dict[str, Any] | None) -> dict[str, Any]:
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
    """The `StructuredOutputs` for SamplingParams; None if the constraint is empty."""
    if not constraint:
        return None
    try:
        return StructuredOutputs(**constraint)
    except ValueError as error:
        raise bad_request(error) from None
