"""What a client is told when something fails: a status and OpenAI's error body, never a path or a traceback."""

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
# SamplingParams and Config write "field=value: rule", the engine's checks "field: rule", those of tools a sentence.
FIELD = re.compile(r"(tools|tool_choice)\b|([a-z_]+)(?:\[[^\]]*\]| token)?(?:=|: )")


class ApiError(Exception):
    """An answer that is no success."""

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
    """The error for a request's field that cannot be honoured, named first."""
    return ApiError(400, f"{param}: {message}", param=param)


def unavailable(message: str, *, code: str) -> ApiError:
    return ApiError(503, message, code=code, headers={"Retry-After": "5"})


def as_api_error(error: Exception) -> ApiError:
    """What to tell the client; a failure of our own is told in the log instead."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, RequestError):
        return bad_request(error)
    if isinstance(error, EngineError):
        return unavailable("the engine has stopped; the request is lost", code="engine_dead")
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than the server allows", code="timeout")
    logger.error("a request failed for a reason of our own", exc_info=error)
    return ApiError(500, "internal server error", code="internal_error")


def bad_request(error: ValueError) -> ApiError:
    """A refusal by the engine or by `SamplingParams`, which begin with the field's name."""
    named = FIELD.match(str(error))
    return ApiError(400, str(error), param=named[1] or named[2] if named else None)
