"""A process's own certificate and the peers that it trusts, read from files, and again when they change.

Knows nothing of what is served. A renewed certificate is in force for the next connection, within ``LOOK_S`` and
without a restart; files that don't fit together (a renewal under way, a damaged file) leave the old ones in force.
Roles are names: a certificate of the cluster's CA that carries ``router.<domain>`` is a router's, wherever it runs.
"""

from __future__ import annotations

import datetime
import logging
import os
import ssl
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import cast

import msgspec

from baton.protos.errors import ConfigError
from baton.tls.reporting import Certificate, Permit, ReloadingContext, permit_all, report_on

ROLES = ("router", "worker", "client", "monitor")
LOOK_S = 1.0  # seconds between looks at the files, because a look is three calls of stat
AGAIN_S = 10.0  # seconds until files that couldn't be used are tried again, because descriptors may have lacked
SOON_S = 7 * 86_400.0  # a certificate that ends sooner is complained about at start
log = logging.getLogger("baton.tls")

Stamp = tuple[tuple[int, int, int], ...]


class TlsFiles(msgspec.Struct, frozen=True):
    """Holds paths of PEM files: a certificate (with its chain), its key, and the CAs that peers must be signed by.

    ``ca`` "" asks no peer for a certificate (the public API). ``domain`` ends the names of roles.
    """

    cert: str
    key: str
    ca: str = ""
    domain: str = "baton.internal"
    trusted_network: bool = False  # transports that can't be encrypted may be used

    def name_of(self, role: str) -> str:
        """Returns the DNS name that a certificate of ``role`` carries: ``role.domain``."""
        return f"{role}.{self.domain}"


class TlsMaterial(msgspec.Struct, frozen=True):
    """Holds the PEM bytes of the files, read together, and TLS contexts made of them."""

    cert: bytes
    key: bytes
    ca: bytes
    server: ssl.SSLContext
    client: ssl.SSLContext
    ends: float  # when the certificate ends, in Unix seconds


class Identity:
    """Holds a process's certificate and keeps it current as its files change. Thread-safe.

    ``where`` names the port in the log; ``permit`` judges a peer's verified certificate; ``names`` not empty: only
    they may connect. A peer that asks this server for a name in ``by_name`` (SNI, RFC 6066) is shown that
    identity's certificate. Raises ConfigError if the files can't be used at first.
    """

    def __init__(
        self,
        files: TlsFiles,
        where: str = "",
        permit: Permit = permit_all,
        clock: Callable[[], float] = time.monotonic,
        names: Sequence[str] = (),
        by_name: Mapping[str, Identity] | None = None,
    ) -> None:
        self.files, self.names, self._by_name = files, tuple(names), dict(by_name or {})
        permit = only_names(self.names) if self.names else permit
        self.generation = 0
        self.where, self.permit, self._clock = where, permit, clock
        self._lock = threading.Lock()
        self._stamp = _stamp(files)
        self._material = self._read()
        self._refused: Stamp | None = None  # files that can't be used, which are tried again at ``_again_at``
        self._again_at = 0.0
        self._complaint = ""  # the last, which is logged once
        self._looked = clock()
        warn_of_end(files.cert, self._material.ends)

    @property
    def ends(self) -> float:
        """Returns when the certificate in force ends, in Unix seconds."""
        return self.current().ends

    def current(self) -> TlsMaterial:
        """Returns the material in force for the next connection; checks the files at most once per ``LOOK_S``."""
        with self._lock:
            if self._clock() - self._looked >= LOOK_S:
                self._looked = self._clock()
                self._look()
            return self._material

    def listener(self) -> ssl.SSLContext:
        """Returns a TLS context for servers that keep one for life; each connection uses the material in force."""
        return ReloadingContext(lambda: self.current().server)

    def _look(self) -> None:
        try:
            stamp = _stamp(self.files)
            if stamp == self._stamp or (stamp == self._refused and self._clock() < self._again_at):
                return
            material = self._read()
            if _stamp(self.files) != stamp:
                return  # it changes still: next time
        except ConfigError as error:
            self._refuse(error)
            return
        self._material, self._stamp, self._refused, self._complaint = material, stamp, None, ""
        self.generation += 1
        log.info("%s: a new certificate is in force%s", self.files.cert, f" on {self.where}" * bool(self.where))
        warn_of_end(self.files.cert, material.ends)

    def _refuse(self, error: ConfigError) -> None:
        self._refused, self._again_at = _stamp_or_none(self.files), self._clock() + AGAIN_S
        if error.message != self._complaint:
            log.error("a new certificate can't be used, the old one stays: %s", error.message)
        self._complaint = error.message

    def _read(self) -> TlsMaterial:
        files = self.files
        material = TlsMaterial(
            _bytes(files.cert, "tls.cert"),
            _bytes(files.key, "tls.key"),
            _bytes(files.ca, "tls.ca") if files.ca else b"",
            _context(files, ssl.PROTOCOL_TLS_SERVER),
            _context(files, ssl.PROTOCOL_TLS_CLIENT),
            certificate_end(files.cert),
        )
        report_on(material.server, self.where, self.permit)
        if self._by_name:
            material.server.sni_callback = self._show_named
        return material

    def _show_named(self, connection: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        """Shows the peer the certificate of the name that it asks for, if another than our own carries it."""
        if (named := self._by_name.get((name or "").lower())) is not None:
            connection.context = named.current().server


def _context(files: TlsFiles, protocol: ssl._SSLMethod) -> ssl.SSLContext:
    """Returns the TLS context: 1.3 where certificates are asked for (``ca``); a port that is open to all takes 1.2
    as well.
    """
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if files.ca else ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(files.cert, files.key)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"{files.cert} and {files.key} are not a certificate and its key: {error}", "tls.cert"
        ) from None
    if files.ca:
        try:
            context.load_verify_locations(files.ca)
        except (ssl.SSLError, OSError) as error:
            raise ConfigError(f"{files.ca} holds no CA certificate: {error}", "tls.ca") from None
        context.verify_mode = ssl.CERT_REQUIRED
    elif protocol is ssl.PROTOCOL_TLS_SERVER:
        context.verify_mode = ssl.CERT_NONE
    if protocol is ssl.PROTOCOL_TLS_SERVER:
        context.set_alpn_protocols(["http/1.1"])
        context.num_tickets = 0  # unread, they would turn the end of a stream into a reset
    return context


def names_in(certificate: Certificate | None) -> tuple[str, ...]:
    """Returns the DNS names in a peer's certificate, given as ``getpeercert`` does."""
    pairs = cast(Iterable[tuple[str, str]], (certificate or {}).get("subjectAltName", ()))
    return tuple(value for kind, value in pairs if kind == "DNS")


def only_roles(files: TlsFiles, roles: Sequence[str]) -> Permit:
    """Returns a permit for certificates that carry the name of one of ``roles``."""
    wanted = {files.name_of(role) for role in roles}

    def permit(certificate: Certificate) -> str:
        names = names_in(certificate)
        return (
            ""
            if wanted & set(names)
            else f"its names are {', '.join(names) or 'none'}, not {' or '.join(sorted(wanted))}"
        )

    return permit


def only_names(allowed: Sequence[str]) -> Permit:
    """Returns a permit for certificates that carry one of the ``allowed`` names; for all if there are none."""
    wanted = set(allowed)

    def permit(certificate: Certificate) -> str:
        names = names_in(certificate)
        return (
            ""
            if not wanted or wanted & set(names)
            else f"its names are {', '.join(names) or 'none'}: not in tls.client_names"
        )

    return permit


def certificate_end(path: str) -> float:
    """Returns when the first certificate in the file ``path`` ends, in Unix seconds. Raises ConfigError."""
    from cryptography import x509  # 20 ms to import: only where there is TLS

    try:
        return x509.load_pem_x509_certificate(Path(path).read_bytes()).not_valid_after_utc.timestamp()
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} holds no certificate: {error}", "tls.cert") from None


def warn_of_end(path: str, ends: float) -> None:
    """Logs an error if the certificate at ``path`` has expired (``ends``, Unix seconds), a warning if it will
    within SOON_S.
    """
    left = ends - time.time()
    if left < SOON_S:
        day = datetime.datetime.fromtimestamp(ends, datetime.UTC).isoformat(timespec="minutes")
        (log.error if left <= 0 else log.warning)(
            "%s %s at %s: renew it (`baton certs renew`)", path, "ended" if left <= 0 else "ends", day
        )


def _bytes(path: str, key: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{key} {path}: {error.strerror}; make it with `baton certs make DIR`", key) from None


def _stamp(files: TlsFiles) -> Stamp:
    found = []
    for key, path in (("tls.cert", files.cert), ("tls.key", files.key), ("tls.ca", files.ca)):
        if not path:
            continue
        try:
            status = os.stat(path)
        except OSError as error:
            raise ConfigError(f"{key} {path}: {error.strerror}; make it with `baton certs make DIR`", key) from None
        found.append((status.st_ino, status.st_mtime_ns, status.st_size))
    return tuple(found)


def _stamp_or_none(files: TlsFiles) -> Stamp | None:
    try:
        return _stamp(files)
    except ConfigError:
        return None
