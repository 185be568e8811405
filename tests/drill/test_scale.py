"""Numbers of workers in the simulated cluster: who is asked for comes, and who isn't leaves."""

from __future__ import annotations

import msgspec
import pytest

from baton.cluster import scale
from baton.drill.draw import draw
from baton.drill.run import Verdict, play
from baton.drill.scenario import Fault, Request, ScaleChange, Scenario, Size
from baton.protos.nouns import Sampling


def scaled(*changes: ScaleChange, faults: tuple[Fault, ...] = (), dies: tuple[float, ...] = ()) -> Scenario:
    """A worker of each role, a prompt every 0.2 s, and operators who ask for other numbers."""
    quiet = draw(8, Size(workers=1, requests=1, kinds=(), pressed=0.0, paged=0.0, adapted=0.0, pinned=0.0))
    asks = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    requests = tuple(Request(i, 0.2 * i, tuple((7 * i + j) % 97 for j in range(60)), asks) for i in range(20))
    plain = {"batches": (), "pages": 300, "local_max": 0, "controller": False, "placed": True, "step_s": 0.02}
    return msgspec.structs.replace(
        quiet, requests=requests, scales=changes, faults=faults, placer_dies=dies, **plain
    )


def told(scenario: Scenario) -> tuple[Verdict, list[str]]:
    verdict = play(scenario, keep_story=True)
    return verdict, [line.split(maxsplit=1)[1] for line in verdict.lines]


def test_workers_come_and_leave_as_operators_ask_and_no_request_is_lost() -> None:
    verdict, said = told(scaled(ScaleChange(0.5, 2, 2), ScaleChange(3.0, 1, 1), dies=(0.6,)))
    assert verdict.held, verdict.violations
    assert (verdict.answered, verdict.failed) == (20, 0)
    assert any("decode-1     ended: drained" in line for line in said)


def test_a_controller_adds_workers_for_what_waits_and_removes_them_again() -> None:
    own = scaled()
    many = tuple(msgspec.structs.replace(r, at=0.05 * r.number, prompt=r.prompt * 4) for r in own.requests)
    verdict, said = told(msgspec.structs.replace(own, requests=many, controller=True, most_workers=4, step_s=0.1))
    assert verdict.held, verdict.violations
    numbers = [line.split("prefill ")[1].split(", decode ") for line in said if "keeps prefill" in line]
    assert max(int(prefill) + int(decode) for prefill, decode in numbers) > 2, numbers


def test_a_placer_that_forgets_the_numbers_as_redis_does_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = scale.begin
    monkeypatch.setattr(scale, "begin", lambda redis, space, planned, now: begin(redis, space, planned))
    flushed = Fault("redis_flushed", 2.5, "prefill-0")
    verdict, _ = told(scaled(ScaleChange(0.5, 2, 2), faults=(flushed,)))
    assert any("nobody asked for it" in violation for violation in verdict.violations), verdict.violations


def test_numbers_asked_for_while_the_placer_got_no_answer_are_no_violation() -> None:
    """An operator asks before Redis stalls, and the placer's next look is answered long after."""
    scenario = msgspec.convert(
        {
            "seed": 168603133, "prefill": 2, "decode": 1, "routers": 1, "pages": 40, "policy": "round_robin",
            "local_max": 0, "chunk_tokens": 250, "max_batch": 16, "step_s": 0.1, "token_s": 0.00001, "hedge": 0.0,
            "swap": False, "lease_ttl_s": 8.0, "tier_pages": 0, "delay_s": 0.0003, "requests_per_min": 6,
            "requests": [], "placed": True, "scales": [{"at": 1.446, "prefill": 3, "decode": 2}],
            "placer_dies": [0.0319],
            "faults": [
                {"kind": "redis_stalls", "at": 1.523, "target": "prefill-1", "other": "router-0", "seconds": 8.5948}
            ],
        },
        Scenario,
    )  # fmt: skip
    verdict = play(scenario, keep_story=True)
    assert verdict.held, verdict.violations
    assert any("keeps prefill 3, decode 2" in line for line in verdict.lines)
