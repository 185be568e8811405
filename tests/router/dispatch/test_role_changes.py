"""Changes of role before real links: they are waited for as long as there is a sign of the worker."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import msgspec
import pytest

from baton.protos.errors import DeadlineExceeded
from baton.protos.v1 import worker_pb2 as w
from baton.router.dispatch import role_control
from tests.router.fake_prefill import FakePrefill
from tests.router.fake_services import FakeDecode
from tests.router.fake_workers import Cluster, cluster, collect, until

ASKED = "d0-1.2"


class Changing(FakeDecode):
    """A decode worker that drains when it is asked for another role; the test brings it back."""

    asked = ""

    async def SetRole(self, request, context):
        self.asked = request.role
        return w.SetRoleResponse(incarnation=ASKED)

    def drain(self, c: Cluster) -> None:
        self.info = msgspec.structs.replace(self.info, state="draining")
        c.roster.join(self)

    async def come_back(self, c: Cluster) -> None:
        await self.die()
        again = FakePrefill("d0", incarnation=ASKED)
        await again.start()
        c.p.append(again)
        again.decodes = {d.info.address: d for d in c.d}
        c.roster.join(again)


@asynccontextmanager
async def with_one_that_changes():
    def changes(c: Cluster) -> None:
        c.d[0] = Changing("d0")

    async with cluster(1, 2, prepare=changes) as c:
        yield c, c.d[0]


async def test_a_worker_that_loads_what_its_role_needs_is_waited_for_and_requests_go_on(monkeypatch) -> None:
    monkeypatch.setattr(role_control, "AWAY_S", 0.3)
    monkeypatch.setattr(role_control, "CHANGE_S", 0.3, raising=False)
    async with with_one_that_changes() as (c, worker):
        change = asyncio.create_task(c.core.roles.set_role("d0", "prefill", 0.0))
        await until(lambda: worker.asked == "prefill")
        worker.drain(c)
        await until(lambda: c.view.snapshot("m").decode[0].info.worker_id == "d1")
        for n in range(4):  # over a second: its engine loads, and its heartbeats go on
            assert len(await collect(c.open([1, 2, 3], 4, request_id=f"r{n}")[0])) == 4
            await asyncio.sleep(0.3)
        assert not change.done(), change
        (pending,) = c.core.roles.changing()
        assert (pending.worker, pending.before, pending.after) == ("d0", "decode", "prefill")
        assert pending.seconds > 1.0
        assert "may load a draft model" in pending.waits_for
        await worker.come_back(c)
        changed = await asyncio.wait_for(change, 30)
        assert (changed.after, changed.incarnation) == ("prefill", ASKED)
        assert c.core.roles.changing() == []


async def test_a_worker_that_leaves_and_does_not_come_back_is_given_up(monkeypatch) -> None:
    monkeypatch.setattr(role_control, "AWAY_S", 0.3)
    async with with_one_that_changes() as (c, worker):
        change = asyncio.create_task(c.core.roles.set_role("d0", "prefill", 0.0))
        await until(lambda: worker.asked == "prefill")
        c.roster.leave("d0")
        await worker.die()
        await until(lambda: "can't be reached" in c.core.roles.changing()[0].waits_for)
        with pytest.raises(DeadlineExceeded, match="d0 did not become a prefill worker: it left"):
            await asyncio.wait_for(change, 30)
        assert c.core.roles.changing() == []


async def test_a_worker_that_never_leaves_its_role_is_given_up_in_the_end(monkeypatch) -> None:
    monkeypatch.setattr(role_control, "LONGEST_S", 0.5)
    async with with_one_that_changes() as (c, worker):
        change = asyncio.create_task(c.core.roles.set_role("d0", "prefill", 0.0))
        await until(lambda: worker.asked == "prefill")
        worker.drain(c)
        with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s, and hasn't left its former role"):
            await asyncio.wait_for(change, 30)
