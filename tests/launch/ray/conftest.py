"""A stand-in for Ray, in place of its modules, and a clock that is set."""

import sys
import types

import pytest

from tests.launch.ray.fake_ray import Clock, FakeRay


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    made = FakeRay()
    groups = types.ModuleType("ray.util.placement_group")
    groups.placement_group = made.place  # type: ignore[attr-defined]
    groups.remove_placement_group = made.removed.append  # type: ignore[attr-defined]
    groups.placement_group_table = made.table  # type: ignore[attr-defined]
    strategies = types.ModuleType("ray.util.scheduling_strategies")
    strategies.PlacementGroupSchedulingStrategy = lambda **options: options  # type: ignore[attr-defined]
    for name, module in (("placement_group", groups), ("scheduling_strategies", strategies)):
        monkeypatch.setitem(sys.modules, f"ray.util.{name}", module)
    return made


@pytest.fixture
def clock() -> Clock:
    return Clock()
