"""Certificates by the config: which files a part of the cluster uses, and what it requires of its peers.

Knows nothing of how TLS is spoken (``baton.tls``).
"""

from __future__ import annotations

import logging
import ssl
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from baton.cluster.hosts import LOOPBACK
from baton.tls.identity import Identity, TlsFiles, only_roles
from baton.tls.reporting import permit_all
from baton.tls.rpc import PLAIN, Dialer

if TYPE_CHECKING:  # pydantic takes 0.15 s to import, and a worker host reads no config
    from prometheus_client import Gauge

    from baton.cluster.config import BatonConfig, TlsConfig

log = logging.getLogger("baton.tls")


def files_of(tls: TlsConfig, role: str) -> TlsFiles | None:
    """Returns the certificate, key and CA files of a process of ``role`` ("router", "worker", …); None if TLS is
    off.
    """
    if not tls.enabled:
        return None
    cert, key, ca = tls.cert, tls.key, tls.ca
    if tls.dir:
        folder = Path(tls.dir).expanduser().absolute()
        cert, key, ca = str(folder / f"{role}.crt"), str(folder / f"{role}.key"), str(folder / "ca.crt")
    return TlsFiles(cert, key, ca, tls.domain, tls.trusted_network)


def identity_of(files: TlsFiles | None, where: str = "", roles: Sequence[str] = ()) -> Identity | None:
    """Returns the identity in ``files``; None without TLS. Only ``roles`` may connect (empty: all). Raises
    ConfigError.

    ``where`` names the port in the log.
    """
    if files is None:
        return None
    return Identity(files, where, only_roles(files, roles) if roles else permit_all)


def router_dialer(config: BatonConfig) -> Dialer:
    """Returns what opens the router's channels to workers, with its certificate if TLS is on."""
    identity = identity_of(files_of(config.tls, "router"))
    return PLAIN if identity is None else Dialer(identity)


def public_identity(config: BatonConfig) -> Identity | None:
    """Returns the identity that the router shows API clients; None for plaintext. Raises ConfigError.

    Where that is a public certificate, those who ask REST for the router's own name (a scraper of the cluster's CA)
    are shown its own.
    """
    tls, own = config.tls, files_of(config.tls, "router")
    if own is None:
        return None
    cert, key = (tls.public_cert, tls.public_key) if tls.public_cert else (own.cert, own.key)
    ca = str(Path(tls.client_ca).expanduser()) if tls.client_ca else ""
    where, named = "the router's ports", {}
    if tls.public_cert:
        named = {own.name_of("router"): Identity(TlsFiles(own.cert, own.key, ca, tls.domain), where)}
    return Identity(TlsFiles(cert, key, ca, tls.domain), where, names=tls.client_names, by_name=named)


def probing_context(config: BatonConfig) -> ssl.SSLContext | None:
    """Returns a TLS context that verifies no peer, to probe a router that this process started; None if TLS is
    off.
    """
    own = files_of(config.tls, "client" if config.tls.dir else "router")
    if own is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if config.tls.client_ca and Path(own.cert).exists():
        context.load_cert_chain(own.cert, own.key)
    return context


def ray_environment(config: BatonConfig) -> dict[str, str]:
    """Returns the variables of Ray's own TLS, the same on every node; empty if it is off."""
    ray, own = config.ray, files_of(config.tls, "ray")
    if ray.cert:
        files = (ray.cert, ray.key, ray.ca)
    elif config.tls.dir and own is not None and Path(own.cert).exists():
        files = (own.cert, own.key, own.ca)
    else:
        return {}
    names = ("RAY_TLS_SERVER_CERT", "RAY_TLS_SERVER_KEY", "RAY_TLS_CA_CERT")
    return {"RAY_USE_TLS": "1", **dict(zip(names, files, strict=True))}


def show_ends(config: BatonConfig, public: Identity | None, gauge: Gauge) -> None:
    """Has ``gauge`` state, at each scrape, when the router's certificates end, in Unix seconds; nothing without
    TLS.
    """
    for kind, identity in (("api", public), ("cluster", identity_of(files_of(config.tls, "router")))):
        if identity is not None:
            gauge.labels(kind=kind).set_function(partial(getattr, identity, "ends"))


def show_end(files: TlsFiles | None, gauge: Gauge) -> None:
    """Has ``gauge`` state, at each scrape, when a worker's certificate ends, in Unix seconds; nothing without
    TLS.
    """
    if (identity := identity_of(files)) is not None:
        gauge.set_function(partial(getattr, identity, "ends"))


def warn_of_plaintext(host: str, files: TlsFiles | None) -> None:
    """Logs a warning if a worker listens beyond loopback (``host``) without TLS (``files`` None)."""
    if files is None and host not in LOOPBACK:
        log.warning(
            "worker.host %s can be reached from outside, in plaintext and without authentication: set [tls], or "
            "let nobody but routers and workers reach its ports",
            host,
        )
