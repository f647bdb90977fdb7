"""Convert `response_format` and `structured_outputs` of a request to `StructuredOutputs`."""

from typing import Any

from nanovllm.sampling_params import StructuredOutputs
from nanovllm.server.errors import bad_request, refuse

KINDS = ("json", "regex", "choice", "grammar", "json_object")


# Further fields of vLLM's `structured_outputs`, of which only this value is accepted.
NEUTRAL = {"disable_fallback": False, "disable_any_whitespace": False, "disable_additional_properties": False}


def constraint(
    response_format: dict[str, Any] | None,
    structured_outputs: dict[str, Any] | None,
    *,
    grammar: str | None = None,
    json_schema: dict[str, Any] | None = None,
    forced_call: bool = False,
) -> dict[str, Any]:
    """The keyword argument of `StructuredOutputs` that the request asks for; empty if there is none.

    `grammar` and `json_schema` are fields of llama.cpp, where an empty grammar means none. `forced_call`: the request
    forces a tool call. `response_format` then has nothing to apply to, because it is the format of the content.
    """
    from_format = _from_response_format(response_format)
    if forced_call:
        from_format = {}
    from_llama_cpp: dict[str, Any] = {"grammar": grammar} if grammar else {}
    if json_schema is not None:
        from_llama_cpp["json"] = json_schema
    if len(from_llama_cpp) > 1 or (from_llama_cpp and (from_format or structured_outputs)):
        name = "grammar" if grammar else "json_schema"
        raise refuse(name, "more than one kind of structured output is requested; request only one")
    from_extension = {
        kind: value
        for kind, value in (structured_outputs or {}).items()
        if value is not None and NEUTRAL.get(kind) is not value
    }
    for kind in from_extension:
        if kind not in KINDS:
            raise refuse("structured_outputs", f"{kind!r} is not supported; supported are {', '.join(KINDS)}")
    if from_extension.get("json_object") is False:
        del from_extension["json_object"]
    if len(from_extension) > 1 or (from_extension and from_format):
        raise refuse("structured_outputs", "more than one kind of structured output is requested; request only one")
    return from_format or from_extension or from_llama_cpp


def _from_response_format(response_format: dict[str, Any] | None) -> dict[str, Any]:
    match response_format:
        case None | {"type": "text"}:
            return {}
        case {"type": "json_object" | "json_schema", "schema": dict(schema)}:  # of llama.cpp
            return {"json": schema}
        case {"type": "json_object", "schema": other} if other is not None:
            raise refuse("response_format", "schema must be a JSON schema, which is an object")
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
