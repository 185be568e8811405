"""Parsing of profile names ``roofline:MODEL@GPUxN,quantization=int8,kv_cache_dtype=int8``. Torch-free."""

from __future__ import annotations

import re

import msgspec

from baton.planner.costs.data_sheets import accelerators
from baton.protos.errors import ConfigError

PREFIX = "roofline:"
OPTIONS = ("quantization", "kv_cache_dtype")  # as in [worker]


class RooflineName(msgspec.Struct, frozen=True):
    """Holds the parts of a roofline profile's name; ``count`` accelerators share one copy of the model."""

    model: str
    gpu: str
    count: int = 1
    quantization: str = "none"
    kv_cache_dtype: str = "auto"

    def __str__(self) -> str:
        plain = RooflineName("", "")
        more = [f",{name}={getattr(self, name)}" for name in OPTIONS if getattr(self, name) != getattr(plain, name)]
        return f"{PREFIX}{self.model}@{self.gpu}x{self.count}{''.join(more)}"


def is_roofline(name: str) -> bool:
    """Returns whether a profile's name asks for the analytic roofline model."""
    return name.startswith(PREFIX)


def parse(name: str) -> RooflineName:
    """Returns the parts of a roofline profile's name. Raises ConfigError that shows the form."""
    model, _, machine = name.removeprefix(PREFIX).rpartition("@")
    where, *options = machine.lower().split(",")
    found = re.fullmatch(rf"({'|'.join(accelerators())})(?:x([1-9]\d{{0,3}}))?", where)
    given = dict(option.partition("=")[::2] for option in options)
    if not model or not found or not given.keys() <= set(OPTIONS):
        known = ", ".join(sorted(accelerators()))
        form = "roofline:MODEL@GPUxN or …,quantization=int8,kv_cache_dtype=int8"
        raise ConfigError(f"{name!r}: write {form}, with GPU one of {known}", "profile")
    return RooflineName(model, found[1], int(found[2] or 1), **given)
