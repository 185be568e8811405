"""Tests what the config makes of certificates, and when they end, for everybody to see."""

import contextlib
import ssl
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.cluster.config import load_config
from baton.cluster.metering.telemetry import RouterMetrics, WorkerMetrics
from baton.process.security import files_of, public_identity, show_end, show_ends
from baton.tls.authority import Authority
from baton.tls.identity import Identity, names_in

DAY_S = 86_400.0


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    made = Authority(tmp_path)
    made.make()
    return made


def config(folder: Path, **more: str):
    return load_config(flags={"tls": {"dir": str(folder), **more}}, search=Path("/nowhere"))


def days_left(registry: CollectorRegistry) -> dict[str, int]:
    lines = [line for line in generate_latest(registry).decode().splitlines() if "_certificate_expiry_" in line]
    samples = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: round((float(value) - time.time()) / DAY_S) for name, value in samples}


def test_a_router_shows_when_each_of_its_certificates_ends(authority: Authority, tmp_path: Path) -> None:
    authority.issue("router", ["router.baton.internal"], days=60)
    authority.issue("public", ["api.example"], days=10)
    settings = config(tmp_path, public_cert=str(tmp_path / "public.crt"), public_key=str(tmp_path / "public.key"))
    metrics = RouterMetrics(CollectorRegistry())
    show_ends(settings, public_identity(settings), metrics.certificate)
    name = "baton_router_certificate_expiry_timestamp_seconds"
    assert days_left(metrics.registry) == {f'{name}{{kind="api"}}': 10, f'{name}{{kind="cluster"}}': 60}


def test_a_renewed_certificate_is_shown_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    authority.issue("worker", ["worker.baton.internal"], days=5)
    metrics = WorkerMetrics(CollectorRegistry(), "decode", "decode-0", "m")
    show_end(files_of(config(tmp_path).tls, "worker"), metrics.optional("certificate"))
    assert set(days_left(metrics.registry).values()) == {5}
    authority.issue("worker", ["worker.baton.internal"], days=80)
    deadline = time.monotonic() + 20
    while set(days_left(metrics.registry).values()) != {80}:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def shown(router: Identity, name: str, ca: str) -> tuple[str, ...]:
    """The names in the certificate that a client is shown who asks for ``name`` and trusts ``ca``."""
    context = ssl.create_default_context(cafile=ca)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(to_client, to_server, server_hostname=name)
    server = router.listener().wrap_bio(to_server, to_client, server_side=True)
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
    return names_in(client.getpeercert())


def test_who_asks_for_the_routers_own_name_is_shown_its_own_certificate_beside_a_public_one(
    authority: Authority, tmp_path: Path
) -> None:
    """Prometheus trusts the cluster's CA and expects router.<domain>; clients trust a public CA."""
    authority.issue("router", ["router.baton.internal"])
    public = Authority(tmp_path / "public")
    public.make()
    public.issue("api", ["api.example"])
    pair = {
        f"public_{kind}": str(tmp_path / "public" / f"api.{end}") for kind, end in (("cert", "crt"), ("key", "key"))
    }
    router = public_identity(config(tmp_path, **pair))
    assert router is not None
    assert shown(router, "router.baton.internal", str(tmp_path / "ca.crt")) == ("router.baton.internal",)
    assert shown(router, "api.example", str(tmp_path / "public" / "ca.crt")) == ("api.example",)
    with pytest.raises(ssl.SSLCertVerificationError):
        shown(router, "api.example", str(tmp_path / "ca.crt"))


def test_without_tls_there_is_no_end_to_show() -> None:
    settings = load_config(search=Path("/nowhere"))
    router, worker = RouterMetrics(CollectorRegistry()), WorkerMetrics(CollectorRegistry(), "decode", "d", "m")
    show_ends(settings, public_identity(settings), router.certificate)
    show_end(files_of(settings.tls, "worker"), worker.optional("certificate") if settings.tls.enabled else None)
    assert days_left(router.registry) == days_left(worker.registry) == {}
