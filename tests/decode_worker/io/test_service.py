"""Tests what the I/O side of a decode worker answers its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from baton.decode_worker.io.host_intake import HostIntake, Said
from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.receiver_orders import Order
from baton.decode_worker.io.router_session import Reply, RouterSession
from baton.decode_worker.io.service import DecodeService
from baton.engine.backends.paced.runner import PacedRunner
from baton.kv.layout.extents import Part
from baton.kv.memory.host_pages import PageMemory
from baton.protos import channel as ch
from baton.protos.errors import ErrorInfo
from baton.protos.nouns import EngineRequest, Extent, Sampling


@pytest.fixture
def sent() -> list[ch.ToEngine]:
    return []


@pytest.fixture
def service(sent: list[ch.ToEngine]) -> DecodeService:
    spec = PacedRunner("test", 32, 997, 4096, lambda s: 0.0).spec
    intake = Intake(PageMemory.create(4, spec.layout.page_bytes), spec.layout, spec.fingerprint, sent.append)
    return DecodeService(sent.append, intake, "m", 30.0)


def test_a_lease_that_the_engine_ended_is_closed_without_a_cancel(
    service: DecodeService, sent: list[ch.ToEngine]
) -> None:
    session = service.open_session("router")
    service.admit(session, EngineRequest("r", (1, 2), 2, Sampling()), "m", False, 0.0, "")
    (admit,) = sent
    assert isinstance(admit, ch.Admit)
    service.take(ch.Admitted(admit.key, b"lease", 1, 0, (0,), (b"hash",)))
    service.take(ch.CloseReceive(admit.key))
    assert sent[1:] == [ch.IntakeClosed(admit.key)]
    assert service._intake.lease(b"lease") is None


class SlowHost:
    """Another host of the worker's ranks, which has done no order yet."""

    def __init__(self, part: Part) -> None:
        self.name, self.part = "far:1", part
        self.then: list[Callable[[], None]] = []

    def send(self, order: Order) -> None:
        """Does nothing with the order, as a host that never answers."""

    def when_done(self, then: Callable[[], None]) -> None:
        self.then.append(then)

    def hear(self, report: Callable[[Said], None]) -> None:
        """Has nothing to report."""


def test_a_request_whose_prompt_is_computed_here_waits_for_no_other_host(sent: list[ch.ToEngine]) -> None:
    spec = PacedRunner("test", 32, 997, 4096, lambda s: 0.0).spec
    half = spec.layout.page_bytes // 2
    parts = [(Extent(at, half, 0, 1),) for at in (0, half)]
    far = SlowHost(parts[1])
    memory = PageMemory.create(4, spec.layout.page_bytes)
    intake = HostIntake(memory, spec.layout, spec.fingerprint, sent.append, parts[0], [far])
    service = DecodeService(sent.append, intake, "m", 30.0)
    session = service.open_session("router")
    for name, local in (("here", True), ("handed", False)):
        service.admit(session, EngineRequest(name, (1, 2), 2, Sampling()), "m", local, 0.0, "")
        admit = sent[-1]
        assert isinstance(admit, ch.Admit)
        service.take(ch.Admitted(admit.key, name.encode(), 1, 0, (0,), (b"hash",)))
    told = replies(session, ch.Admitted)
    assert told == ["here"], "the other lease isn't known to all hosts"
    assert len(far.then) == 1


def test_another_roles_message_is_refused_by_name(service: DecodeService) -> None:
    with pytest.raises(AssertionError, match="PrefillFailed"):
        service.take(ch.PrefillFailed(1, ErrorInfo("BatonError", "")))


def test_a_request_that_comes_as_the_role_ends_is_refused_without_a_word_to_the_engine(
    service: DecodeService, sent: list[ch.ToEngine]
) -> None:
    service.hang_up()
    session = service.open_session("router")
    service.admit(session, EngineRequest("r", (1, 2), 2, Sampling()), "m", False, 0.0, "")
    assert sent == []
    assert service.active == 0
    assert refusals(session) == ["r"]


def test_a_cancelled_request_that_waited_as_the_role_ends_says_nothing_of_the_one_that_took_its_id(
    service: DecodeService,
) -> None:
    session, request = service.open_session("router"), EngineRequest("r", (1, 2), 2, Sampling())
    service.admit(session, request, "m", False, 0.0, "")
    waited = session.requests["r"]
    service.cancel(session, "r", "gone")
    service.admit(session, request, "m", False, 0.0, "")
    service.hang_up()
    service._admit(waited, ch.Admit(waited.key, request, True, 30.0))
    assert refusals(session) == []
    assert session.requests["r"] is not waited


def refusals(session: RouterSession) -> list[str]:
    """The ids of the requests that the session's router hears a refusal of, once the session has ended."""
    return replies(session, ch.Refused)


def replies(session: RouterSession, kind: type) -> list[str]:
    """The ids of the requests of which the session's router hears a message of ``kind``, once it has ended."""

    async def heard() -> list[str]:
        session.end()
        said = [item async for item in session.outgoing() if isinstance(item, Reply)]
        return [reply.request_id for reply in said if isinstance(reply.message, kind)]

    return asyncio.run(heard())
