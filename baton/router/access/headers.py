"""Headers of callers that are passed on only if they are well formed.

Knows nothing of REST or gRPC.
"""

from __future__ import annotations

import re

_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def clean_traceparent(text: str | None) -> str:
    """Returns ``text`` if it is a well-formed W3C traceparent, else ""."""
    return text if text and _TRACEPARENT.fullmatch(text) else ""


def clean_request_id(text: str | None) -> str:
    """Returns ``text`` if it is a request id safe to log and echo (1 to 128 visible ASCII characters), else ""."""
    return text if text and _REQUEST_ID.fullmatch(text) else ""
