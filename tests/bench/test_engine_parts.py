"""Tests the engine's benchmark: which of its parts run, and the ceiling beside large products."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from baton.bench.engine import report
from baton.bench.engine.linear import DotProducts
from baton.bench.rows import Row
from baton.kernels.abi import native
from baton.protos.errors import ConfigError

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")


def test_a_part_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="linears is unknown; choose of linear, attention, step, start"):
        report.show(("150M",), ("int8",), "bf16", (1,), 1, None, None, ("linears",))


def test_only_the_parts_asked_for_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def stand_in(part: str) -> Callable[..., Iterator[Row]]:
        def rows(*_: object) -> Iterator[Row]:
            ran.append(part)
            return iter(())

        return rows

    for part in report.PARTS:
        monkeypatch.setattr(getattr(report, part), "rows", stand_in(part))
    assert report.show(("150M",), ("int8",), "bf16", (1,), 1, None, None, ("attention", "step")) == 0
    assert ran == ["attention", "step"]


def test_the_ceiling_does_about_as_many_operations_as_the_product() -> None:
    done = native.function("ceiling_dots", native.I32, native.I32, native.I64, result=native.I64)
    if not (once := done(1, 64, 1)):
        pytest.skip("a CPU without such dot products")
    dots = DotProducts(True, 10 * once)
    assert dots.rate() > 0
    assert dots.rounds == 10
