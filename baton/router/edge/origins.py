"""Protection against hostile web pages: checks of Host and Origin where no API key is needed, CORS where it is
configured.

Knows nothing of endpoints. Without keys, whoever reaches the port may ask. A web page in a browser on this machine
reaches a loopback port too: by a name of its own that it lets point to 127.0.0.1 (DNS rebinding), which shows in
Host, or by a POST that needs no preflight, which shows in Origin. CORS is the Fetch standard's protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.router.api.error_wording import http_error_at

PROBES = frozenset({"/health", "/ready"})
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS = ("GET", "POST", "DELETE")
EXPOSED = ("x-request-id", "request-id", "x-baton-route", "x-baton-ignored", "retry-after", "retry-after-ms")
MAX_AGE_S = 600  # seconds that a browser may keep a preflight's answer


class LoopbackOnly:
    """ASGI middleware that serves only requests whose Host is this machine or one of ``hosts``, from pages of
    ``origins``; others get 421 or 403.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str], origins: Sequence[str]) -> None:
        self._app, self._hosts = app, frozenset(name.lower() for name in hosts)
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes a request on, or answers it with an error that names the setting to change."""
        if scope["type"] == "http" and scope["path"] not in PROBES:
            headers = Headers(scope=scope)
            host, origin = headers.get("host"), headers.get("origin")
            if host is not None and not self._serves(host_of(host)):
                text = f"this router asks nobody for a key, so it serves loopback names only, not {host[:200]!r}: "
                remedy = "add it to router.allowed_hosts, or use a keys_file"
                refusal = http_error_at(scope["path"], 421, text + remedy, "wrong_host", {})
                await refusal(scope, receive, send)
                return
            if origin is not None and scope["method"] not in SAFE and not self._trusts(origin):
                text = f"this router asks nobody for a key, so pages of {origin[:200]!r} may not use it: "
                remedy = "add it to router.cors_origins, or use a keys_file"
                refusal = http_error_at(scope["path"], 403, text + remedy, "wrong_origin", {})
                await refusal(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _serves(self, host: str) -> bool:
        return is_loopback(host) or host in self._hosts

    def _trusts(self, origin: str) -> bool:
        return not {origin, "*"}.isdisjoint(self._origins) or self._serves(host_of(origin.partition("//")[2]))


def host_of(authority: str) -> str:
    """Returns the host of ``host[:port]`` in lower case, without brackets; "" for a malformed one."""
    try:
        return urlsplit(f"//{authority}").hostname or ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Returns whether ``host``, a name or an address, always means this machine."""
    if host == "localhost" or host.endswith(".localhost"):  # RFC 6761: never anything else
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Returns ``app`` with CORS for pages of ``origins``; unchanged if there are none.

    "*" allows any page, but without credentials.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=tuple(origins),
        allow_methods=METHODS,
        allow_headers=("*",),
        allow_credentials="*" not in origins,
        expose_headers=EXPOSED,
        max_age=MAX_AGE_S,
    )
