"""A cluster whose every port speaks TLS: it serves, it lets nobody else in, and takes up new certificates."""

import ssl
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from baton.tls.authority import Authority
from bench.intruders import DOMAIN, Port, describe, papers_of, shown_certificate, tour
from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.paced import Oracle

CAUSES = {
    "plaintext": ("plaintext", "WRONG_VERSION_NUMBER", "HTTP_REQUEST"),
    "no certificate": ("the peer showed no certificate", "PEER_DID_NOT_RETURN_A_CERTIFICATE"),
    "a stranger's CA": ("unable to get local issuer certificate", "self-signed certificate in certificate chain"),
    "expired": ("certificate has expired",),
    "another role": ("somebody.example",),
}


@pytest.fixture(scope="module")
def fleet(authorities: tuple[Authority, Authority]) -> Iterator[Fleet]:
    with secured_fleet(authorities[0].folder) as running:
        yield running


@pytest.fixture(scope="module")
def authorities(tmp_path_factory: pytest.TempPathFactory) -> tuple[Authority, Authority]:
    ours, stranger = (Authority(tmp_path_factory.mktemp("tls") / name) for name in ("ours", "stranger"))
    for made in (ours, stranger):
        made.make()
    names = [f"{role}.{DOMAIN}" for role in ("worker", "router", "client")]
    ours.issue("expired", [*names, "localhost", "127.0.0.1"], days=-1)
    ours.issue("nobody", ["somebody.example"])
    return ours, stranger


def secured_fleet(folder: Path, transport: str = "tcp") -> Fleet:
    tls = {"dir": str(folder), "client_ca": str(folder / "ca.crt"), "client_names": [f"client.{DOMAIN}"]}
    worker = {"device": "paced:zero", "kv_transport": transport}
    return Fleet(worker=worker, tls=tls, router={"local_prefill_max_tokens": 0})


def client_of(ours: Authority) -> httpx.Client:
    context = ssl.create_default_context(cafile=ours.folder / "ca.crt")
    context.load_cert_chain(ours.folder / "client.crt", ours.folder / "client.key")
    return httpx.Client(verify=context, timeout=60)


def ask(fleet: Fleet, client: httpx.Client, prompt: list[int]) -> list[int]:
    body = {"model": fleet.name, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    reply = client.post(fleet.url + "/v1/completions", json=body | {"return_token_ids": True})
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"][0]["token_ids"]


def ports_of(fleet: Fleet) -> list[Port]:
    found = [
        Port("router REST", "http", fleet.url.partition("//")[2], "client", "router"),
        Port("router gRPC", "inference", fleet.grpc, "client", "router"),
    ]
    for slot in fleet.slots:
        record = fleet.record(slot)
        found.append(Port(f"{slot} gRPC", "worker", record.address, "router", "worker"))
        found.append(Port(f"{slot} metrics", "http", record.metrics_address, "monitor", "worker"))
    return found


def kv_port(fleet: Fleet, ours: Authority) -> Port:
    info = describe(fleet.record("decode-0").address, papers_of(ours, "router"))
    return Port("decode-0 KV", "kv", info.data_addresses["tcp"], "worker", "worker")


def test_every_port_serves_its_own_and_refuses_everybody_else_with_the_cause_in_the_log(authorities, fleet) -> None:
    ours, stranger = authorities
    with client_of(ours) as client:
        oracle = Oracle("zero")
        for seed in range(3):
            prompt = oracle.prompt(seed, 200)
            assert ask(fleet, client, prompt) == oracle.answer(prompt, 8)
        ports = [*ports_of(fleet), kv_port(fleet, ours)]
        visits = tour(ours, stranger, ports)
        wrong = [v for v in visits if v.served != (v.visitor == "the right role")]
        assert not wrong, wrong
        for name in ("router", "prefill-0", "decode-0"):
            for visitor in {v.visitor for v in visits if v.port.name.startswith(name)} - {"the right role"}:
                wait_for(partial(is_told, fleet, name, visitor), what=f"the cause of {visitor} in {name}'s log")
        prompt = oracle.prompt(9, 300)
        assert ask(fleet, client, prompt) == oracle.answer(prompt, 8), "the visits left something behind"


def is_told(fleet: Fleet, name: str, visitor: str) -> bool:
    """Returns whether the log of a process says why it refused the visitor: it may after the visitor has left."""
    return any(cause in fleet.log(name, 100_000) for cause in CAUSES[visitor])


def certificate_ends(fleet: Fleet, ours: Authority) -> dict[str, float]:
    """Returns when each certificate ends, by the metrics of the router and of every worker."""
    context = ssl.create_default_context(cafile=ours.folder / "ca.crt")
    context.check_hostname = False  # workers are known by role, not by address
    context.load_cert_chain(ours.folder / "monitor.crt", ours.folder / "monitor.key")
    found = {}
    with httpx.Client(verify=context, timeout=60) as scraper:
        scraped = [fleet.record(slot).metrics_address for slot in fleet.slots]
        for address in scraped:
            found |= _ends(scraper.get(f"https://{address}/metrics").text)
    with client_of(ours) as client:
        return found | _ends(client.get(f"{fleet.url}/metrics").text)


def _ends(exposition: str) -> dict[str, float]:
    lines = [
        line for line in exposition.splitlines() if "_certificate_expiry_" in line and not line.startswith("#")
    ]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_renewed_certificates_are_taken_up_by_every_port_without_a_restart(authorities, fleet) -> None:
    ours, _ = authorities
    with client_of(ours) as client:
        oracle, pids = Oracle("zero"), [fleet.record(slot).pid for slot in fleet.slots]
        ports = [*ports_of(fleet), kv_port(fleet, ours)]
        prompt = oracle.prompt(1, 200)
        assert ask(fleet, client, prompt) == oracle.answer(prompt, 8)
        ends = certificate_ends(fleet, ours)
        assert len(ends) == 2 + len(fleet.slots)
        before = {port.name: shown_certificate(port, papers_of(ours, port.role)) for port in ports}
        ours.make(anew=True)
        for port in ports:
            wait_for(
                lambda port=port: shown_certificate(port, papers_of(ours, port.role)) != before[port.name],
                what=f"{port.name} with a new certificate",
            )
        wait_for(
            lambda: all(end > ends[name] for name, end in certificate_ends(fleet, ours).items()), what="new ends"
        )
        gone = fleet.record("decode-0").incarnation
        fleet.kill("decode-0", "io")  # whoever connects to its successor shows the new certificate
        fleet.wait_for_return("decode-0", gone)
        with client_of(ours) as again:
            for seed in range(3):
                prompt = oracle.prompt(10 + seed, 200)
                assert ask(fleet, again, prompt) == oracle.answer(prompt, 8)
        assert fleet.record("prefill-0").pid == pids[fleet.slots.index("prefill-0")], "nobody else was restarted"
