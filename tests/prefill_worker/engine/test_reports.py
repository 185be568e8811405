"""When an engine reports its figures; only the channel is a list."""

from __future__ import annotations

from baton.protos import channel as ch
from tests.prefill_worker.engine.test_loop import Bench


def test_an_idle_engine_that_is_asked_for_its_counts_reports_only_what_has_changed() -> None:
    bench = Bench()

    def reports() -> int:
        bench.now += 1.0
        bench.loop.turn([ch.AskSnapshot(1)])
        bench.now += 1.0
        bench.loop.turn([])
        return sum(isinstance(message, ch.Stats) for message in bench.tape.sent)

    first = reports()
    assert reports() == first
    bench.pool.allocate(2)
    assert reports() == first + 1
    assert reports() == first + 1
