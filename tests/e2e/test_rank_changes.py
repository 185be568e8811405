"""Workers of several ranks under load: roles change, workers are replaced, ranks are killed; no answer differs."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from functools import cache
from pathlib import Path

import pytest

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.plan import Runner
from baton.protos.nouns import Sampling
from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.e2e.test_kills import Outcome, _load, _right_again
from tests.e2e.test_ranks import PREFILL_FIRST, followers, gone
from tests.e2e.test_rerole import changed
from tests.engine.backends.ranks.other_host import children, other_host
from tests.engine.backends.ranks.threads import SharedDriver

KILLS = int(os.environ.get("BATON_RANK_KILLS", "20"))
SEED = int(os.environ.get("BATON_RANK_KILLS_SEED", "22"))
CLIENTS = 4
REPETITION = 1.1  # what the model's generation_config.json asks for where a request says nothing
KINDS = [
    {"prefill_tp": 2, "decode_tp": 2},
    {"prefill_cp": 2, "decode_pp": 2},
    {"prefill_tp": 3, "decode_tp": 2, "decode_pp": 2},
]


@cache
def runner() -> Runner:
    return load_runner(EngineConfig(DRAFT, threads=1))


class OneRank:
    """Stands in for the paced oracle: a few prompts, and what one rank answers to them."""

    def __init__(self) -> None:
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def prompt(self, seed: int, length: int, shared: int = 0) -> list[int]:
        return [(seed % 5 * 977 + 7 * i + i * i) % 4000 + 3 for i in range(length)]

    def answer(self, prompt: list[int], max_tokens: int) -> list[int]:
        if tuple(prompt) not in self._answers:
            sampling = Sampling(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, repetition_penalty=REPETITION
            )
            driver = SharedDriver(runner(), -(-(len(prompt) + max_tokens) // 16))
            self._answers[tuple(prompt)] = driver.answer([prompt], sampling)[0]
        return self._answers[tuple(prompt)]

    def know(self) -> OneRank:
        """Computes every answer ahead."""
        for seed in range(5):
            for length in (20, 150, 500):
                self.answer(self.prompt(seed, length), 40)
        return self


@pytest.fixture(scope="module")
def oracle() -> OneRank:
    return OneRank().know()


@pytest.mark.thorough
async def test_ranks_stay_while_their_worker_changes_its_role_and_go_when_it_is_replaced(oracle: OneRank) -> None:
    widths, outcome, stop = {"prefill_tp": 2, "decode_pp": 2}, Outcome(), asyncio.Event()
    with Fleet(1, 2, cluster=widths, worker={"model": DRAFT}, router=PREFILL_FIRST) as fleet:
        load = asyncio.create_task(_load(fleet, oracle, outcome, stop, CLIENTS, seed=3))  # type: ignore[arg-type]
        await _right_again(outcome, CLIENTS)
        ranks = followers(fleet, "decode-1")
        for role in ("prefill", "decode"):
            await changed(fleet, "decode-1", role)
            await _right_again(outcome, CLIENTS)
        assert followers(fleet, "decode-1") == ranks
        for slot in ("decode-1", "prefill-0"):
            before, ranks = fleet.record(slot).incarnation, followers(fleet, slot)
            await asyncio.to_thread(fleet.replace, slot, fleet.command)
            await asyncio.to_thread(fleet.wait_for_return, slot, before)
            assert all(gone(pid) for pid in ranks)
            assert len(followers(fleet, slot)) == 1
            await _right_again(outcome, CLIENTS)
        stop.set()
        await load
        assert outcome.wrong == {}
        fleet.wait_for_baseline()


@pytest.mark.thorough
async def test_a_worker_of_two_hosts_changes_its_role_and_its_pages_serve_both(
    oracle: OneRank, tmp_path: Path
) -> None:
    outcome, stop = Outcome(), asyncio.Event()
    with other_host(tmp_path / "log") as (address, _):
        worker = {"model": DRAFT, "pp": 2, "rank_hosts": [address]}
        spins = {"loop_stall_s": 1.0}
        with Fleet(1, 2, worker=worker, router=PREFILL_FIRST, telemetry=spins) as fleet:
            load = asyncio.create_task(_load(fleet, oracle, outcome, stop, CLIENTS, seed=5))  # type: ignore[arg-type]
            await _right_again(outcome, CLIENTS)
            for role in ("prefill", "decode", "prefill"):
                await changed(fleet, "decode-1", role)
                await _right_again(outcome, CLIENTS)
            stop.set()
            await load
            assert outcome.wrong == {}
            fleet.wait_for_baseline()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("widths", KINDS, ids=lambda widths: "-".join(widths))
async def test_seeded_kills_of_ranks_cost_no_wrong_answer_and_leave_none_over(
    oracle: OneRank, widths: dict[str, int]
) -> None:
    """``BATON_RANK_KILLS`` kills of any rank of any worker, the lead too; one in eight stands still instead.

    Each takes about ten seconds: a worker starts again, and every client has to have a right answer again. Up to 14
    ranks spin on whatever cores there are, so loops may stand still for longer than in other clusters.
    """
    rng, outcome, stop, times = random.Random(SEED), Outcome(), asyncio.Event(), list[float]()
    worker = {"model": DRAFT, "stall_s": 4.0}
    spins = {"loop_stall_s": 1.0}
    with Fleet(2, 2, cluster=widths, worker=worker, router=PREFILL_FIRST, telemetry=spins) as fleet:
        load = asyncio.create_task(_load(fleet, oracle, outcome, stop, CLIENTS, seed=3))  # type: ignore[arg-type]
        for number in range(KILLS):
            await _right_again(outcome, CLIENTS)
            slot, still = rng.choice(fleet.slots), rng.random() < 0.125
            await asyncio.sleep(rng.uniform(0, 0.5))
            times.append(await asyncio.to_thread(ended, fleet, slot, rng.random(), still))
            assert outcome.wrong == {}, f"kill {number}"
        await _right_again(outcome, CLIENTS)
        stop.set()
        await load
        fleet.wait_for_baseline()
    times.sort()
    told = f"{KILLS} kills, outcomes {outcome.counts}"
    print(f"{widths}: {told}; back after p50 {times[len(times) // 2]:.2f} s, max {times[-1]:.2f} s", flush=True)
    assert outcome.wrong == {}


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_seeded_kills_of_processes_of_two_hosts_cost_no_wrong_answer_and_leave_none_over(
    oracle: OneRank, tmp_path: Path
) -> None:
    """``BATON_RANK_KILLS`` kills of engines, and of what another host runs for them: ranks, what ships KV."""
    rng, outcome, stop, times = random.Random(SEED), Outcome(), asyncio.Event(), list[float]()
    with other_host(tmp_path / "log") as (address, agent):
        worker = {"model": DRAFT, "stall_s": 4.0, "pp": 2, "rank_hosts": [address]}
        spins = {"loop_stall_s": 1.0}
        with Fleet(2, 2, worker=worker, router=PREFILL_FIRST, telemetry=spins) as fleet:
            load = asyncio.create_task(_load(fleet, oracle, outcome, stop, CLIENTS, seed=4))  # type: ignore[arg-type]
            for number in range(KILLS):
                await _right_again(outcome, CLIENTS)
                await asyncio.sleep(rng.uniform(0, 0.5))
                times.append(await asyncio.to_thread(lost, fleet, agent, rng.random()))
                assert outcome.wrong == {}, f"kill {number}"
            await _right_again(outcome, CLIENTS)
            stop.set()
            await load
            fleet.wait_for_baseline()
        wait_for(lambda: not children(agent), what="the end of the other host's processes")
    times.sort()
    told = f"{KILLS} kills, outcomes {outcome.counts}"
    print(f"two hosts: {told}; back after p50 {times[len(times) // 2]:.2f} s, max {times[-1]:.2f} s", flush=True)
    assert outcome.wrong == {}


def lost(fleet: Fleet, agent: int, which: float) -> float:
    """Kills the process at share ``which`` of all engines and of all that the other host runs for them.

    Returns the seconds until the worker that it belonged to is back.
    """
    before = {slot: fleet.record(slot) for slot in fleet.slots}
    pids = [record.engine_pid for record in before.values()]
    pids += [pid for session in children(agent) for pid in children(session)]
    began = time.monotonic()
    os.kill(pids[int(which * len(pids))], signal.SIGKILL)
    (slot,) = wait_for(
        lambda: [slot for slot, record in before.items() if fleet.record(slot).incarnation != record.incarnation],
        what="another life of a worker",
    )
    return fleet.wait_for_return(slot, before[slot].incarnation) - began


def ended(fleet: Fleet, slot: str, which: float, still: bool) -> float:
    """Ends, or stops, a rank of the slot's worker, the one at share ``which`` of them.

    Returns the seconds until the worker is back and no rank is left over.
    """
    before = fleet.record(slot)
    pids = [before.engine_pid, *followers(fleet, slot)]
    began = time.monotonic()
    os.kill(pids[int(which * len(pids))], signal.SIGSTOP if still else signal.SIGKILL)
    back = fleet.wait_for_return(slot, before.incarnation) - began
    wait_for(lambda: all(gone(pid) for pid in pids), what="the end of every rank")
    return back
