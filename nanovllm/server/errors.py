"""Errors that are sent to clients: a status and a body in OpenAI's format, without paths or tracebacks."""

import re
from collections.abc import Mapping
from typing import Any

from nanovllm.errors import EngineError, RequestError
from nanovllm.utils.logging import get_logger

logger = get_logger(__name__)

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
# The field at the beginning of an error message. SamplingParams and Config write "field=value: rule", the engine
# "field: rule", and the checks of tools a sentence that begins with the field.
FIELD = re.compile(r"(tools|tool_choice)\b|([a-z_]+)(?:\[[^\]]*\]| token)?(?:=|: )")


class ApiError(Exception):
    """An error response: HTTP status, message, and the request's field (`param`) that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def type(self) -> str:
        return TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")

    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def refuse(param: str, message: str) -> ApiError:
    """The error for a field of the request that is invalid or not supported. The message begins with the field."""
    return ApiError(400, f"{param}: {message}", param=param)


def unavailable(message: str, *, code: str) -> ApiError:
    """The error for a server that cannot serve requests at the moment."""
    return ApiError(503, message, code=code, headers={"Retry-After": "5"})


def as_api_error(error: Exception) -> ApiError:
    """The error response for an exception. The details of an internal error are logged, not sent."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad_request(error)
    if isinstance(error, EngineError):
        return unavailable("the engine has stopped; the request is lost", code="engine_dead")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than the server allows", code="timeout")
    logger.error("a request failed with an internal error", exc_info=error)
    return ApiError(500, "internal server error", code="internal_error")


def bad_request(error: ValueError) -> ApiError:
    """The error response for a ValueError of the engine or `SamplingParams`, whose message begins with the field."""
    named = FIELD.match(str(error))
    return ApiError(400, str(error), param=named[1] or named[2] if named else None)
