"""Calls of a running router by a command: one JSON request; a refusal becomes the exception that it stands for.

Knows nothing of what is asked or of how an answer is shown.
"""

from __future__ import annotations

import http.client
import json
import ssl
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import msgspec

from baton.cluster.config import BatonConfig
from baton.console.cluster.workers import local_config
from baton.process.security import probing_context
from baton.protos.errors import (
    BatonError,
    ConfigError,
    Forbidden,
    InvalidRequest,
    RequestUnknown,
    Unauthenticated,
    Unavailable,
)
from baton.protos.json import Json

TIMEOUT_S = 5.0  # seconds for a router's answer
_REFUSALS: dict[int, type[BatonError]] = {401: Unauthenticated, 403: Forbidden, 404: RequestUnknown}


class RouterEndpoint(msgspec.Struct, frozen=True):
    """Holds a router's base URL and the API key for it; without a ``context``, $SSL_CERT_FILE may name the CA for
    an https:// URL. ``remedy`` says what to do where no router answers.
    """

    url: str
    key: str = ""
    context: ssl.SSLContext | None = None
    remedy: str = "pass --url"

    def call(self, method: str, path: str, body: Json | None = None, timeout_s: float = TIMEOUT_S) -> Json:
        """Sends a request, ``body`` as JSON, and returns the router's JSON answer.

        Raises ConfigError if no router answers within ``timeout_s`` seconds, else the BatonError of its refusal.
        """
        headers = {"content-type": "application/json"}
        if self.key:
            headers["authorization"] = f"Bearer {self.key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.url.rstrip("/") + path, data, headers, method=method)
            with urllib.request.urlopen(request, timeout=timeout_s, context=self.context) as response:
                found: Json = json.load(response)
                return found
        except urllib.error.HTTPError as error:
            raise refusal(error) from None
        except http.client.HTTPException:
            https = ", or https:// where it speaks TLS" if self.url.startswith("http://") else ""
            text = f"what answers at {self.url} speaks no HTTP/1.1; {self.remedy}{https}"
            raise ConfigError(text, "url") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", None)
            if isinstance(reason, ssl.SSLCertVerificationError):
                text = f"the certificate of {self.url} isn't trusted ({reason.verify_message})"
                raise ConfigError(f"{text}; name its CA: SSL_CERT_FILE=certs/ca.crt", "url") from None
            raise ConfigError(f"no router answers at {self.url} ({error}); {self.remedy}", "url") from None


def router(url: str | None, key: str) -> RouterEndpoint:
    """Returns the endpoint at ``url``, or that of the one cluster on this machine if ``url`` is None.

    Raises ConfigError if none runs here, or several.
    """
    if url:
        return RouterEndpoint(url, key)
    config = local_config(Path(tempfile.gettempdir()))
    return RouterEndpoint(url_of(config), key, probing_context(config))


def refusal(error: urllib.error.HTTPError) -> BatonError:
    """Returns the BatonError that stands for a router's HTTP error, with its message."""
    try:
        message = json.load(error)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = f"the router answered HTTP {error.code}"
    if error.code == http.client.UNAUTHORIZED:
        message += " (a command takes it from BATON_API_KEY in the environment, most by --key as well)"
    kind = InvalidRequest if 400 <= error.code < 500 else Unavailable
    return _REFUSALS.get(error.code, kind)(message)


def url_of(config: BatonConfig) -> str:
    """Returns the base URL of a cluster's router, as reached from this machine."""
    listens, scheme = config.router, "https" if config.tls.enabled else "http"
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]"}.get(listens.host, listens.host)
    return f"{scheme}://{host}:{listens.port}"
