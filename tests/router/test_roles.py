"""Role changes at their seams: several at once end together, and too few ready workers are told."""

import asyncio
import time

import msgspec
import pytest

from baton.protos.errors import NoWorker, Unavailable
from baton.protos.nouns import WorkerInfo
from baton.router.roles import RoleControl
from tests.router.fake_workers import info


class Link:
    """A worker's link that changes after ``after_s``, or fails."""

    def __init__(self, is_now: WorkerInfo, after_s: float = 0.0, fails: bool = False) -> None:
        self.info, self.up = is_now, True
        self._after_s, self._fails = after_s, fails

    async def set_role(self, role: str, grace_s: float) -> str:
        await asyncio.sleep(self._after_s)
        if self._fails:
            raise Unavailable("it would not")
        self.info = msgspec.structs.replace(self.info, role=role)
        return self.info.incarnation


class View:
    def __init__(self, links: list[Link]) -> None:
        self._links = links

    def reachable(self, role: str) -> int:
        return sum(k.up and k.info.role == role for k in self._links)

    def busy(self, worker_id: str) -> tuple[int, int]:
        return 0, 0


def worker(number: int, state: str = "ready") -> WorkerInfo:
    return info(f"decode-{number}", "decode", incarnation=str(number), state=state)


def control(links: list[Link]) -> RoleControl:
    async def look() -> None:
        return None

    return RoleControl(links, View(links), time.monotonic, look)


async def test_when_one_of_several_changes_fails_the_others_are_over_too_before_it_is_told():
    links = [Link(worker(0)), Link(worker(1), fails=True), Link(worker(2), after_s=0.2)]
    with pytest.raises(Unavailable, match="it would not"):
        await control(links).move(["decode-1", "decode-2"], "prefill", 0.0)
    assert [k.info.role for k in links] == ["decode", "decode", "prefill"]


async def test_a_ratio_that_too_few_ready_workers_could_form_changes_none():
    links = [Link(worker(0)), Link(worker(1)), Link(worker(2, "draining"))]
    links[0].info = msgspec.structs.replace(links[0].info, state="draining")
    with pytest.raises(NoWorker, match="only 1 of the 2"):
        await control(links).set_ratio(2, 1)
    assert {k.info.role for k in links} == {"decode"}
