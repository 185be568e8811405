"""Converts errors to Anthropic's error object.

Knows nothing of endpoints or bodies. https://docs.anthropic.com/en/api/errors
"""

from __future__ import annotations

from baton.protos.json import Json
from baton.router.api.errors import error_json

PATH = "/v1/messages"
UNTHREADED = {"error_code": "thread_unsupported_request"}
"""``details`` of a refused field ``thread``, by which Anthropic's clients send the whole conversation instead."""
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_messages_path(path: str) -> bool:
    """Returns whether the endpoint at ``path`` words its errors as Anthropic does."""
    return path == PATH or path.startswith(f"{PATH}/")


def of_openai(told: Json, status: int) -> Json:
    """Returns OpenAI's error object ``told`` as Anthropic's; ``status`` is the HTTP status.

    ``param``, the parameter at fault, is an addition of ours; the message names it as well, for clients that show
    nothing else.
    """
    error = told["error"]
    message, param = error["message"], error["param"]
    if param and param not in message:
        message = f"{param}: {message}"
    kind = _TYPES.get(status, "api_error" if status >= 500 else "invalid_request_error")
    named = {"param": param} if param else {}
    details = {"details": UNTHREADED} if param == "thread" else {}
    return {"type": "error", "error": {"type": kind, "message": message, **named, **details}}


def anthropic_error(error: BaseException) -> Json:
    """Returns ``error`` as the object ``{"type": "error", "error": {"type", "message", "param"}}``."""
    return of_openai(error_json(error), getattr(error, "http_status", 500))
