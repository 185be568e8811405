"""Tests how full a worker is, by the measure that the controller decides with."""

import msgspec
import pytest

from baton.controller.observation import ObservedWorker, fullness
from baton.controller.pressure import Backlog, Demand, WorkerLimits, every_ratio
from baton.protos.measurements import StepCurve, WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo

CURVE = StepCurve(0.005, 2e-5, 0.0, 1e-4, 1e-8)
INFO = WorkerInfo("w", "i", "decode", "", "m", "", KvLayout("u8", (), 16, "u8"), 4096, 100, (), 1000, max_batch=64)
SLOS = 512, 1.0, 0.05, 30.0


def full(role: str, **load) -> float | None:
    seen = ObservedWorker(msgspec.structs.replace(INFO, role=role), WorkerLoad(**{"step_curve": CURVE} | load))
    return fullness(seen, *SLOS)


def test_a_decode_worker_that_steps_all_the_time_for_few_sequences_is_not_full_and_the_advice_agrees():
    shown = full("decode", busy=0.92, running=3, decode_tokens_per_s=540.0, leased_pages=3 * 60)
    workers = WorkerLimits(CURVE, CURVE, 512, 64, 16000, *SLOS[1:3])
    asked = Demand(0.0, 0.0, 0.0, 540.0, 960.0)
    advised = every_ratio(asked, Backlog(running=3), workers, 2, SLOS[3])[0].decode
    assert shown == pytest.approx(advised)
    assert shown < 0.3


@pytest.mark.parametrize(
    "load",
    [{"running": 64}, {"running": 10, "leased_pages": 900}, {"running": 20, "waiting": 50}],
    ids=["seats", "pages", "queue"],
)
def test_seats_pages_and_what_waits_make_a_decode_worker_full(load):
    assert full("decode", **load) >= 1.0


def test_a_prefill_worker_is_as_full_as_its_time_and_queue_are_of_what_bursts_leave():
    assert full("prefill", busy=0.4) == pytest.approx(0.5)
    assert full("prefill", busy=0.8, waiting_tokens=100_000) > 1.0


def test_one_that_reads_its_prompts_itself_is_fuller_and_one_without_a_curve_says_nothing():
    alone, reading = full("decode", running=3), full("decode", running=3, prefill_tokens_per_s=10_000.0)
    assert reading > alone + 0.2
    assert full("decode", running=3, step_curve=None) is None
