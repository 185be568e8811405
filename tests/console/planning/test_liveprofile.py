"""Tests `baton profile measure`: it finds the curve that real workers were given."""

import asyncio
from types import SimpleNamespace

import pytest

from baton.bench import live_handoffs
from baton.console.planning import liveprofile
from baton.cost.profiles import load_profile
from baton.planner.costs.measured import StepTiming, fit, predicted
from baton.planner.costs.paced_file import to_toml
from baton.planner.costs.worker import worker_costs
from baton.protos.errors import InvalidRequest, NoWorker
from baton.protos.measurements import StepCurve, TransferCurve
from tests.e2e.fleet import Fleet

PROFILE = """
about = "slow enough that a busy machine hardly shows"
kv_bytes_per_token = 1024
model_kv_bytes_per_token = 1024
pages = 1024
vocab_size = 4096
max_model_len = 8192
prefill_chunk = 512

[step]
fixed = 0.01
prefill_token = 0.0002
prefill_pair = 2e-8
decode_sequence = 0.002
decode_context_token = 1e-6

[transfer]
fixed = 0.0
per_byte = 0.0
"""


async def test_answers_that_never_wrote_at_once_or_came_all_at_once_are_asked_for_again(monkeypatch) -> None:
    monkeypatch.setattr(liveprofile, "BATCHES", (8,))
    monkeypatch.setattr(liveprofile, "CONTEXTS", (64,))
    measured, asked = iter([None, 0.0, 0.002, 0.004]), list[int]()

    async def step(self: liveprofile.MeasuringClient, context: int, batch: int) -> float | None:
        asked.append(batch)
        return next(measured)

    monkeypatch.setattr(liveprofile.MeasuringClient, "_step", step)
    layout = SimpleNamespace(block_tokens=16)
    info = SimpleNamespace(pages=1000, max_model_len=4096, layout=layout, max_batch=64, vocab_size=100)
    monkeypatch.setattr(liveprofile, "prompt_room", lambda layout, pages: 16 * pages)
    monkeypatch.setattr(liveprofile, "_private_pages", lambda info: 10)
    bench = liveprofile.MeasuringClient(SimpleNamespace(info=info), 512)
    (point,) = await bench.answers()
    assert (point.seconds, asked) == (0.002, [8, 8, 8])


@pytest.mark.thorough
def test_a_live_workers_curve_is_measured_and_written_as_a_profile(tmp_path, monkeypatch):
    monkeypatch.setattr(liveprofile, "LENGTHS", (64, 512, 2048))
    monkeypatch.setattr(live_handoffs, "LENGTHS", (64, 512, 2048))
    monkeypatch.setattr(liveprofile, "TOGETHER", ((64, 4),))
    monkeypatch.setattr(liveprofile, "STEPS", 16)
    monkeypatch.setattr(liveprofile, "BATCHES", (1, 8))
    monkeypatch.setattr(liveprofile, "CONTEXTS", (64, 2048))
    given = tmp_path / "given.toml"
    given.write_text(PROFILE)
    with Fleet(1, 1, worker={"device": f"paced:{given}"}) as fleet:
        found = asyncio.run(liveprofile.measure(fleet.config, "", 1, lambda line: None))
        fleet.wait_for_baseline()
    curve, truth = found.costs.curve, load_profile(str(given)).step
    for point in found.points:
        assert predicted(curve, point) == pytest.approx(predicted(truth, point), rel=0.5), (point, curve)
    assert found.transfers == 6
    own = found.costs.overhead
    assert 0 < own.request < 1
    assert 0 <= own.handoff < 1
    assert own.step == 0  # measured steps hold it
    out = tmp_path / "measured.toml"
    out.write_text(to_toml(found.costs, found.info.vocab_size, found.info.max_model_len, found.chunk_tokens))
    again = worker_costs(str(out))
    assert again.step_seconds(512, 512 * 256, 0, 0) == pytest.approx(
        found.costs.step_seconds(512, 512 * 256, 0, 0), rel=1e-3
    )
    assert again.kv_tokens == 1024 * 16
    assert again.overhead.request == pytest.approx(own.request, rel=1e-3)


def test_a_worker_that_is_not_there_is_an_error_that_names_it(tmp_path):
    with Fleet(1, 1, worker={"device": "paced:zero"}) as fleet, pytest.raises(NoWorker, match="nobody"):
        asyncio.run(liveprofile.measure(fleet.config, "nobody", 1, lambda line: None))


def test_of_a_handoff_is_left_what_neither_reading_nor_bytes_nor_the_way_back_took():
    first = live_handoffs.PromptTimes(200, 1000, 0.5, 2.0, 0.1)  # it also connected
    later = live_handoffs.PromptTimes(200, 1000, 0.002, 0.110, 0.1)
    found = live_handoffs.overhead([first, later, later], TransferCurve(0.001, 1e-6), 512)
    assert found.request == pytest.approx(0.002)
    assert found.handoff == pytest.approx(0.110 - 0.1 - 0.002 - 0.001 - 0.001)
    assert live_handoffs.overhead([], TransferCurve(0.0, 0.0), 512).request == 0
    assert live_handoffs.overhead([later], TransferCurve(1.0, 0.0), 512).handoff == 0  # never negative


def test_points_of_a_curve_give_the_curve_back():
    truth = StepCurve(0.01, 1e-4, 1e-8, 1e-3, 1e-7)
    shapes = [
        (1, 64, 2048, 0, 0),
        (8, 4096, 8388608, 0, 0),
        (1, 0, 0, 1, 64),
        (1, 0, 0, 64, 65536),
        (1, 0, 0, 64, 64),
    ]
    points = [StepTiming("", *s, seconds=0.0) for s in shapes]
    points = [StepTiming("", *s, seconds=predicted(truth, p)) for s, p in zip(shapes, points, strict=True)]
    found = fit(points)
    for name in StepCurve.__struct_fields__:
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3)


def test_a_coefficient_is_never_negative_and_few_points_are_refused():
    falling = [StepTiming("", 1, n, 0, 0, 0, seconds=0.02 - n * 1e-6) for n in (64, 512, 1024, 4096)]
    assert min(getattr(fit(falling), name) for name in StepCurve.__struct_fields__) >= 0
    with pytest.raises(InvalidRequest, match="needs 4"):
        fit(falling[:2])
