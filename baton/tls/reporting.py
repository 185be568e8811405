"""TLS handshakes that fail on our side are logged, with the cause in words and the port's name.

Knows nothing of files or roles. asyncio and uvloop drop a failed handshake in silence; both run it through an
``SSLObject`` that the context makes, so the report is made there.
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("baton.tls")

Certificate = Mapping[str, object]  # as ``getpeercert`` shows it
Permit = Callable[[Certificate], str]
"""Returns the reason why a peer with this verified certificate is refused; "" lets the peer in."""

WAITS = (ssl.SSLWantReadError, ssl.SSLWantWriteError)
PLAINTEXT = "what came is not TLS: the peer speaks plaintext"
CAUSES = {
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the peer showed no certificate",
    # What OpenSSL says of bytes that are no TLS depends on the bytes.
    **dict.fromkeys(
        (
            "HTTP_REQUEST",
            "HTTPS_PROXY_REQUEST",
            "WRONG_VERSION_NUMBER",
            "UNEXPECTED_MESSAGE",
            "LENGTH_MISMATCH",
            "LENGTH_TOO_SHORT",
            "PACKET_LENGTH_TOO_LONG",
            "ENCRYPTED_LENGTH_TOO_LONG",
            "INVALID_ALERT",
            "UNKNOWN_ALERT_TYPE",
            "BAD_CHANGE_CIPHER_SPEC",
        ),
        PLAINTEXT,
    ),
    "UNSUPPORTED_PROTOCOL": "the peer speaks too old a TLS",
    "NO_SHARED_CIPHER": "the peer and we have no cipher in common",
    "TLSV1_ALERT_UNKNOWN_CA": "the peer does not know the CA of our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the peer says that our certificate has expired",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the peer refuses our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the peer refuses our certificate",
    "TLSV13_ALERT_CERTIFICATE_REQUIRED": "the peer wants a certificate and we showed none",
}


def permit_all(certificate: Certificate) -> str:
    """Permits every peer whose certificate the CA has signed; returns ""."""
    return ""


def cause(error: Exception) -> str:
    """Returns in words why a handshake failed with ``error``."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the peer's certificate is refused: {error.verify_message}"
    reason = getattr(error, "reason", None) or ""
    return CAUSES.get(reason, f"{reason or error}")


class NotPermitted(ssl.SSLError):
    """Raised if a peer's certificate is valid but not permitted on this port."""


def check_peer(connection: ssl.SSLObject | ssl.SSLSocket, permit: Permit) -> None:
    """Raises NotPermitted if ``permit`` objects to the peer's certificate, which is verified already."""
    against = permit(connection.getpeercert() or {})
    if against:
        raise NotPermitted(f"the peer's certificate is refused: {against}")


def log_refusal(where: str, error: Exception, peer: str = "") -> None:
    """Logs a warning about a refused or failed connection from ``peer`` to the port that ``where`` names."""
    text = str(error.args[0]) if isinstance(error, NotPermitted) else cause(error)
    log.warning("TLS refused on %s%s: %s", where or "a port", f" from {peer}" * bool(peer), text)


def report_on(context: ssl.SSLContext, where: str, permit: Permit) -> None:
    """Has ``context`` log failed handshakes on event loops, and refuse peers to which ``permit`` objects."""

    class Reporting(ssl.SSLObject):
        """Reports one connection's TLS state."""

        def do_handshake(self) -> None:
            try:
                super().do_handshake()
                if self.server_side:
                    check_peer(self, permit)
            except WAITS:
                raise
            except ssl.SSLError as error:
                log_refusal(where, error)
                raise

    context.sslobject_class = Reporting  # type: ignore[assignment]


class ReloadingContext(ssl.SSLContext):
    """Stands for the TLS context that ``current`` returns at each connection, for servers that keep one context for
    life.
    """

    _current: Callable[[], ssl.SSLContext]

    def __new__(cls, current: Callable[[], ssl.SSLContext]) -> ReloadingContext:
        context: ReloadingContext = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._current = current
        return context

    def __init__(self, current: Callable[[], ssl.SSLContext]) -> None:
        pass

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Returns a TLS object of the context that is current now; arguments as of ``ssl.SSLContext``."""
        return self._current().wrap_bio(*args, **kwargs)

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        """Returns a TLS socket of the context that is current now; arguments as of ``ssl.SSLContext``."""
        return self._current().wrap_socket(*args, **kwargs)
