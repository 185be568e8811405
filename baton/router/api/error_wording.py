"""Chooses the wording of an error by the endpoint that was asked: Anthropic's for its own endpoints, else OpenAI's.

Knows nothing of what the endpoints do.
"""

from __future__ import annotations

from starlette.responses import Response

from baton.protos.errors import BatonError
from baton.router.api.anthropic.errors import anthropic_error, is_messages_path, of_openai
from baton.router.api.errors import error_response, json_response, plain_json, retry_headers


def error_at(path: str, error: BaseException) -> Response:
    """Returns the HTTP response for ``error`` of a request for ``path``, with Retry-After on 429 and 503."""
    if not is_messages_path(path):
        return error_response(error)
    status = error.http_status if isinstance(error, BatonError) else 500
    return json_response(anthropic_error(error), status, retry_headers(error))


def http_error_at(path: str, status: int, message: str, code: str, headers: dict[str, str]) -> Response:
    """Returns the response of an HTTP error that is no BatonError: an unknown path, a wrong method."""
    told = plain_json(status, message, code)
    return json_response(of_openai(told, status) if is_messages_path(path) else told, status, headers)
