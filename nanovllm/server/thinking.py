"""How much a model shall think: `reasoning_effort`, `reasoning.effort` and `thinking` of requests.

An effort is a variable of the chat template; what it changes is up to the template. A budget is a number of tokens,
after which the engine ends the reasoning.
"""

from dataclasses import dataclass, field
from typing import Any

from nanovllm.server.errors import refuse

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SUMMARIES = (None, "auto")  # reasoning is returned whole: it is never summarized


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """What the `thinking` field of the Messages API asks for."""

    template_kwargs: dict[str, Any] = field(default_factory=dict)
    budget: int | None = None  # tokens
    is_shown: bool = True


def effort_variables(effort: Any, param: str = "reasoning_effort") -> dict[str, Any]:
    """The template variables for an effort. `param` is the request's field, for error messages.

    "none" also sets `enable_thinking`, the variable with which templates of Qwen3 and others switch reasoning off.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        raise refuse(param, f"effort must be one of {', '.join(EFFORTS)}")
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


def check_reasoning(reasoning: dict[str, Any] | None) -> dict[str, Any]:
    """The template variables for the `reasoning` field of the Responses API."""
    given = reasoning or {}
    for name, value in given.items():
        if name not in ("effort", "summary") and value is not None:
            raise refuse("reasoning", f"{name!r} is not supported; supported are effort and summary")
    if given.get("summary") not in SUMMARIES:
        raise refuse("reasoning", "summary: reasoning is returned whole and not summarized; only auto is accepted")
    return effort_variables(given.get("effort"), "reasoning")


def output_effort(config: dict[str, Any] | None) -> dict[str, Any]:
    """The template variables for the `output_config` field of the Messages API."""
    for name, value in (config or {}).items():
        if name not in ("effort", "format") and value is not None:
            raise refuse("output_config", f"{name!r} is not supported; supported are effort and format")
    return effort_variables((config or {}).get("effort"), "output_config")


def read_thinking(thinking: dict[str, Any] | None, *, model_thinks: bool) -> Thinking:
    """Check the `thinking` field of the Messages API. `model_thinks`: there is a parser for the model's reasoning."""
    if thinking is None:
        return Thinking()
    shown = thinking.get("display") != "omitted"
    if thinking.get("display") not in (None, "summarized", "omitted"):
        raise refuse("thinking", "display must be summarized or omitted")
    match thinking:
        case {"type": "disabled"}:
            return Thinking(template_kwargs={"enable_thinking": False})
        case {"type": "adaptive"}:  # the model decides whether it thinks; one that never does may decide that
            return Thinking(template_kwargs={"enable_thinking": True}, is_shown=shown)
        case {"type": "enabled", "budget_tokens": int(budget)} if budget >= 1 and budget is not True:
            if not model_thinks:
                raise refuse("thinking", "this model does not reason; set the type to adaptive or disabled")
            return Thinking(template_kwargs={"enable_thinking": True}, budget=budget, is_shown=shown)
        case {"type": "enabled"}:
            raise refuse("thinking", "budget_tokens must be a positive number of tokens")
    raise refuse("thinking", "type must be enabled, adaptive or disabled")
