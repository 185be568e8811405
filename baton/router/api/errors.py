"""Converts errors to OpenAI's error object, HTTP status and headers; ``error_wording`` chooses between wordings.

Knows nothing of endpoints. An exception that is no BatonError becomes a 500 whose details stay in the log.
"""

from __future__ import annotations

import math

import orjson
from starlette.responses import Response

from baton.protos.errors import BatonError
from baton.protos.json import Json

# Codes that clients of OpenAI look for; every other code is the error's own label.
_CODES = {
    "context_too_long": "context_length_exceeded",
    "invalid_request": "invalid_value",
    "unauthenticated": "invalid_api_key",
    "quota_exceeded": "rate_limit_exceeded",
}
MOST_TOLD = 2000  # characters of a message
_RETRY_LATER = (429, 503)  # statuses that come with Retry-After, because the same call may succeed later


def error_json(error: BaseException) -> Json:
    """Returns an error as OpenAI's object ``{"error": {"message", "type", "param", "code"}}``."""
    if isinstance(error, BatonError):
        code = _CODES.get(error.label, error.label)
        return _object(error.message, error.http_status, error.param or None, code)
    return _object("The server had an error; its log says which.", 500, None, "internal")


def error_response(error: BaseException) -> Response:
    """Returns the HTTP response for an error, with Retry-After headers on status 429 and 503."""
    status = error.http_status if isinstance(error, BatonError) else 500
    return json_response(error_json(error), status, retry_headers(error))


def retry_headers(error: BaseException) -> dict[str, str]:
    """Returns ``retry-after`` (whole seconds, RFC 9110) and ``retry-after-ms`` for an error of status 429 or 503,
    else {}.
    """
    if not isinstance(error, BatonError) or error.http_status not in _RETRY_LATER:
        return {}
    seconds = error.retry_after_s
    return {
        "retry-after": str(max(1, math.ceil(seconds))),
        "retry-after-ms": str(max(1, math.ceil(seconds * 1000)) if seconds else 1000),
    }


def plain_error(status: int, message: str, code: str, headers: dict[str, str] | None = None) -> Response:
    """Returns the response of an HTTP error that is no BatonError: an unknown path, a wrong method."""
    return json_response(plain_json(status, message, code), status, headers)


def plain_json(status: int, message: str, code: str) -> Json:
    """Returns OpenAI's error object for an error that is no BatonError and has no parameter at fault."""
    return _object(message, status, None, code)


def json_response(content: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Returns a response with ``content`` as JSON, encoded by orjson."""
    return Response(orjson.dumps(content), status, headers, media_type="application/json")


def _object(message: str, status: int, param: str | None, code: str) -> Json:
    if len(message) > MOST_TOLD:  # it quotes what was sent
        message = f"{message[:MOST_TOLD]}…"
    param = param[:MOST_TOLD] if param else param
    return {"error": {"message": message, "type": _type(status), "param": param, "code": code}}


def _type(status: int) -> str:
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"
