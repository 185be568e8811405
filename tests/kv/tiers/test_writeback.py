"""Pool, write-back, tiers and lifting together: each page one owner, each byte right, at rest nothing held."""

from __future__ import annotations

import asyncio
import errno
import tempfile
import threading
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.kv.tiers import disk, stack, writeback
from baton.kv.tiers.disk import DiskTier
from baton.kv.tiers.holdings import Holdings
from baton.kv.tiers.memory import host_slab
from baton.kv.tiers.slab import copying as slab_copying
from baton.kv.tiers.stack import Tier, Tiers
from baton.kv.tiers.writeback import WriteBack
from baton.protos.errors import PoolExhausted
from tests.kv.sharers import LAYOUT, PAGE, Sharer, chain, content, settle

CHAIN = chain(40)
ROOM = PAGE + 64


class Tiered(Sharer):
    """A small device over a host tier of ``host`` pages and, in ``folder``, a disk tier of ``disk`` pages."""

    def __init__(self, pages: int = 24, host: int = 40, disk: int = 0, folder: Path | None = None) -> None:
        super().__init__(pages)
        self.pool.watch_idle()
        made = []
        slab = host_slab(host * ROOM, PAGE)
        if slab is not None:
            made.append(Tier("host", slab))
        self.disk = DiskTier(folder, 4096 + disk * ROOM, LAYOUT, "f") if folder else None
        if self.disk is not None:
            made.append(Tier("disk", self.disk.slab))
        self.tiers = Tiers(made)
        self.holdings = Holdings(self.tiers)
        self.index: set[bytes] = set()
        self.holdings.announce_to(self._publish)
        self.writeback = WriteBack(self.tell, self.memory, self.tiers, self.holdings, lambda: 0.0)
        self.kept = self.writeback.take
        self._task = asyncio.create_task(self.writeback.run())

    def _publish(self, added: Sequence[bytes], removed: Sequence[bytes]) -> None:
        self.index.difference_update(removed)
        self.index.update(added)

    @property
    def held(self) -> set[bytes]:
        """Returns the blocks that the device or a tier holds."""
        return {*self.pool.findable()} | self.tiers.hashes()

    def report(self) -> None:
        """Reports changes and idle pages, as the engine does ten times a second."""
        self.holdings.changed(*self.pool.drain_changes())
        self.writeback.idle(self.pool.drain_idle())

    async def rest(self) -> None:
        self.report()
        await self.writeback.settled()
        self.report()
        await self.writeback.settled()
        await settle()

    async def lift(self, hashes: Sequence[bytes]) -> int:
        count, lower = self.holdings.leading(hashes)
        if lower:
            await self.filler.load(hashes[:count], self.tiers.load)
            await settle()
        return count

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self.tiers.close()
        if self.disk is not None:
            self.disk.close()


async def test_what_the_device_evicted_comes_back_from_the_host_tier():
    worker = Tiered(pages=24, host=40)
    worker.compute(CHAIN[:20])
    await worker.rest()
    worker.compute(chain(20, salt=1))
    await worker.rest()
    assert worker.pool.match(CHAIN) < 20
    assert await worker.lift(CHAIN[:20]) == 20
    assert worker.holds(CHAIN) == 20
    assert worker.index.issuperset(CHAIN[:20])
    assert worker.at_baseline()
    await worker.close()


async def test_a_tier_gives_up_tails_before_heads_and_the_index_hears_of_it():
    worker = Tiered(pages=30, host=10)
    worker.compute(CHAIN[:10])
    await worker.rest()
    for salt in (1, 2):
        worker.compute(chain(25, salt)[:2])
        await worker.rest()
    assert [h in worker.tiers for h in CHAIN[:10]] == [True] * 6 + [False] * 4
    worker.compute(chain(26, salt=3))  # the device evicts the first chain
    worker.holdings.changed(*worker.pool.drain_changes())
    assert [h in worker.index for h in CHAIN[:10]] == [True] * 6 + [False] * 4
    await worker.close()


async def test_the_disk_tier_takes_over_what_the_host_has_no_room_for_and_what_is_damaged_there():
    with tempfile.TemporaryDirectory() as folder:
        worker = Tiered(pages=24, host=6, disk=60, folder=Path(folder))
        worker.compute(CHAIN[:20])
        await worker.rest()
        worker.compute(chain(20, salt=1))
        await worker.rest()
        host = worker.tiers.tiers[0].slab.store
        host.pages[:] ^= 1  # every byte of the host tier goes wrong
        assert await worker.lift(CHAIN[:20]) == 20
        assert worker.holds(CHAIN) == 20
        await worker.close()


async def test_a_restarted_worker_finds_its_disk_tier_and_announces_it():
    with tempfile.TemporaryDirectory() as folder:
        first = Tiered(host=0, disk=60, folder=Path(folder))
        first.compute(CHAIN[:20])
        await first.rest()
        await first.close()
        second = Tiered(host=0, disk=60, folder=Path(folder))
        assert second.index == set(CHAIN[:20])
        assert await second.lift(CHAIN) == 20
        assert second.holds(CHAIN) == 20
        assert second.at_baseline()
        await second.close()


async def test_a_page_that_is_being_copied_is_not_evicted_and_keeps_its_place():
    worker = Tiered(pages=10, host=40)
    worker.compute(CHAIN[:10])
    page = worker.pool.keep(CHAIN[9])  # the tail: first to go
    assert page is not None
    assert worker.pool.available == 9
    worker.compute(chain(5, salt=1))
    assert bytes(worker.memory.page(page)) == content(CHAIN[9])
    assert worker.pool.match(CHAIN[:4]) == 4
    worker.pool.unkeep(page)
    worker.compute(chain(1, salt=2))
    assert worker.pool.keep(CHAIN[9]) is None
    await worker.close()


async def test_lifting_that_is_cancelled_writes_no_page_afterwards():
    worker = Tiered(pages=24, host=60)
    worker.compute(CHAIN[:20])
    await worker.rest()
    worker.compute(chain(22, salt=1))
    await worker.rest()
    for turns in range(12):
        lifting = asyncio.create_task(worker.lift(CHAIN[:20]))
        for _ in range(turns):
            await asyncio.sleep(0)
        lifting.cancel()
        await asyncio.gather(lifting, return_exceptions=True)
        await settle()
        assert worker.at_baseline()
        worker.compute(chain(22, salt=1))
        assert worker.holds(chain(22, salt=1)) == 22
        worker.report()
    await worker.close()


class Stuck:
    """Something that a tier's thread calls: it begins, and goes on when it is told to."""

    def __init__(self, of: Any, name: str) -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        self._act = getattr(of, name)
        self.undo = partial(setattr, of, name, self._act)
        setattr(of, name, self)

    def __call__(self, *args: Any) -> Any:
        self.began.set()
        assert self.go_on.wait(20)
        return self._act(*args)


async def until(event: threading.Event) -> None:
    async with asyncio.timeout(20):
        while not event.is_set():
            await asyncio.sleep(0.001)


async def with_a_chain_below(**sizes: Any) -> Tiered:
    """The first 20 blocks are in every tier, and most of them no more on the device."""
    worker = Tiered(pages=24, **sizes)
    for known in (CHAIN[:20], chain(22, salt=1)):
        worker.compute(known)
        await worker.rest()
    return worker


async def is_next_owner_alone(worker: Tiered, stuck: Stuck, ended: Awaitable[Any]) -> bool:
    """Returns whether the next request, with all pages that are free now, keeps what it writes while the thread
    goes on.
    """
    with worker.pool.open([], worker.pool.available) as owner:
        for page in owner.pages:
            worker.memory.page(page)[:] = b"n" * PAGE
        stuck.go_on.set()
        await asyncio.gather(ended, return_exceptions=True)
        await settle()
        for tier in worker.tiers.tiers:  # whatever their threads had to do, they have done it
            await tier.run(lambda *_: None)
        return {bytes(worker.memory.page(page)) for page in owner.pages} == {b"n" * PAGE}


@pytest.mark.parametrize("cancels", [1, 2, 5])
@pytest.mark.parametrize(("tier", "step"), [("host", "copy"), ("disk", "copy"), ("disk", "fetch")])
async def test_pages_that_a_thread_still_writes_are_nobody_elses_however_often_its_caller_is_cancelled(
    monkeypatch, cancels, tier, step
):
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"host": 60} if tier == "host" else {"host": 0, "disk": 60, "folder": Path(folder)}
        worker = await with_a_chain_below(**sizes)
        stuck = Stuck(slab_copying, "copy") if step == "copy" else Stuck(worker.tiers.tiers[0].slab.store, step)
        lifting = asyncio.create_task(worker.lift(CHAIN[:20]))
        await until(stuck.began)
        for _ in range(cancels):
            lifting.cancel()
            await settle()
        assert lifting.done() == (step == "fetch"), "a copy is waited for, a disk is not"
        assert await is_next_owner_alone(worker, stuck, lifting)
        stuck.undo()
        assert lifting.cancelled()
        assert worker.at_baseline()
        await worker.close()


async def test_a_disk_that_hangs_costs_one_request_its_patience_and_the_others_nothing(monkeypatch):
    monkeypatch.setattr(stack, "HUNG_S", 0.0)
    with tempfile.TemporaryDirectory() as folder:
        worker = await with_a_chain_below(host=0, disk=60, folder=Path(folder))
        [tier] = worker.tiers.tiers
        stuck = Stuck(tier.slab.store, "fetch")
        patient, worker.filler._stall_s = worker.filler._stall_s, 0.3
        lifting = asyncio.create_task(worker.lift(CHAIN[:20]))
        await until(stuck.began)
        await asyncio.wait_for(lifting, 20)
        worker.filler._stall_s = patient
        assert worker.filler.failures == 1
        assert worker.at_baseline(), "its pages are not the disk's"
        assert tier.hung
        await worker.lift(CHAIN[:20])
        assert worker.filler.failures == 1, "it found nothing, at once"
        stuck.undo()
        stuck.go_on.set()
        async with asyncio.timeout(20):
            while tier.hung:
                await asyncio.sleep(0.001)
        await worker.lift(CHAIN[:20])
        assert worker.holds(CHAIN[:20]) == 20
        await worker.close()


async def test_a_disk_that_fails_costs_the_blocks_it_fails_on(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        worker = await with_a_chain_below(host=0, disk=60, folder=Path(folder))

        def fail(*_: Any) -> int:
            raise OSError(errno.EIO, "the disk is broken")

        with monkeypatch.context() as patch:
            patch.setattr(disk.os, "preadv", fail)
            await worker.lift(CHAIN[:20])
            assert worker.filler.failures == 0
            assert worker.at_baseline()
            patch.setattr(disk.os, "pwrite", fail)
            worker.compute(CHAIN[:20])
            await worker.rest()
        assert worker.holds(CHAIN[:20]) == 20
        assert worker.tiers.tiers[0].slab.failed > 1
        await worker.close()


async def test_the_index_hears_of_blocks_that_are_damaged():
    worker = await with_a_chain_below(host=60)
    worker.tiers.tiers[0].slab.store.pages[:] ^= 1
    await worker.lift(CHAIN[:20])
    assert worker.tiers.tiers[0].slab.damaged
    worker.compute(chain(22, salt=2))
    await worker.rest()
    assert worker.index == worker.held
    await worker.close()


async def test_the_index_hears_of_blocks_that_went_for_others_that_came_too_slowly(monkeypatch):
    with tempfile.TemporaryDirectory() as folder:
        worker = Tiered(pages=24, host=0, disk=16, folder=Path(folder))
        worker.compute(CHAIN[:16])
        await worker.rest()
        monkeypatch.setattr(writeback, "STALL_S", 0.05)
        stuck = Stuck(worker.tiers.tiers[0].slab.store, "flush")
        worker.compute(chain(22, salt=1))
        await worker.rest()
        stuck.go_on.set()
        stuck.undo()
        monkeypatch.undo()
        worker.compute(chain(22, salt=2))
        await worker.rest()
        assert worker.index == worker.held
        await worker.close()


async def test_pages_that_one_tier_still_copies_stay_kept_when_another_tier_fails():
    with tempfile.TemporaryDirectory() as folder:
        worker = Tiered(pages=24, host=60, disk=60, folder=Path(folder))
        host, broken = (tier.slab for tier in worker.tiers.tiers)
        stuck = Stuck(slab_copying, "copy")
        put = broken.put

        def fail(*_: Any) -> None:
            raise RuntimeError("a bug of ours")

        broken.put = fail
        worker.compute(CHAIN[:10])
        worker.report()
        await until(stuck.began)
        await settle()
        assert worker.pool.available == 24 - 10, "pages that are being copied can't be had"
        broken.put = put
        stuck.go_on.set()
        stuck.undo()
        await worker.rest()
        assert worker.pool.available == 24
        host.check()
        await worker.close()


steps = st.lists(
    st.tuples(st.sampled_from(["compute", "lift", "hold", "release", "report", "wait"]), st.integers(0, 3),
              st.integers(1, 14)),
    max_size=40,
)  # fmt: skip


@given(steps, st.integers(4, 30), st.booleans())
def test_any_order_of_use_eviction_copy_and_lift_keeps_every_byte_right(played, host, with_disk):
    async def play(folder: Path) -> None:
        worker = Tiered(pages=20, host=host, disk=25, folder=folder if with_disk else None)
        chains, held, lifts = [chain(14, salt) for salt in range(4)], [], []
        for action, salt, blocks in played:
            hashes = chains[salt][:blocks]
            if action == "compute":
                with suppress(PoolExhausted):
                    worker.compute(hashes)
            elif action == "lift":
                lifts.append(asyncio.create_task(worker.lift(hashes)))
            elif action == "hold":
                found = worker.pool.match(hashes)
                held.append((worker.pool.open(hashes[:found], found), hashes))
            elif action == "release" and held:
                lease, known = held.pop()
                assert [bytes(worker.memory.page(p)) for p in lease.pages] == list(
                    map(content, known[: lease.held])
                )
                lease.close()
            elif action == "report":
                worker.report()
            worker.pool.check()
            await asyncio.sleep(0.001 if action == "wait" else 0)
        for lease, _ in held:
            lease.close()
        await asyncio.gather(*lifts)
        await worker.rest()
        assert worker.at_baseline()
        for tier in worker.tiers.tiers:
            tier.slab.check()
            assert tier.slab.damaged == 0
        device = {h for known in chains for h in known if worker.pool.match([h])}
        assert worker.index == device | worker.tiers.hashes()
        for known in chains:
            worker.holds(known)
        await worker.close()

    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(play(Path(folder)))
