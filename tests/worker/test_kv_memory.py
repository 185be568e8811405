"""KV takes what a card and its host have room for, where the config doesn't say how much."""

from __future__ import annotations

import logging
from typing import Literal

import pytest

from baton.engine.backends.cuda.gpu import ROOM_BYTES, Gpu
from baton.engine.program.rank_program import kv_share
from baton.protos.errors import ConfigError
from baton.worker.kv_memory import ON_A_CPU, KvRoom, copied_on_demand, kv_bytes, kv_room
from baton.worker.spec import CacheSpec

GIB = 1 << 30
H100 = Gpu("NVIDIA H100", (9, 0), (13, 0), 80 * GIB)


def on_card(cache: CacheSpec, weights: int = 16 * GIB, host: int = 1000 * GIB) -> int:
    return kv_bytes(cache, "cuda", weights, lambda: H100, lambda: host)


def test_what_the_config_names_is_taken_anywhere() -> None:
    assert on_card(CacheSpec(kv_memory_bytes=5)) == kv_bytes(CacheSpec(kv_memory_bytes=5), "cpu", 0) == 5


def test_a_cpu_takes_little() -> None:
    assert kv_bytes(CacheSpec(), "cpu", 16 * GIB) == kv_bytes(CacheSpec(), "paced:zero", 0) == ON_A_CPU


@pytest.mark.parametrize(("share", "sharers"), [(0.85, 1), (0.85, 2), (1.0, 1), (0.5, 1)])
def test_a_card_s_workers_take_its_share_together_weights_and_room_included(share: float, sharers: int) -> None:
    cache = CacheSpec(kv_memory_share=share, card_sharers=sharers)
    each = on_card(cache) + 16 * GIB + ROOM_BYTES
    assert each * sharers == pytest.approx(share * H100.memory_bytes, abs=sharers)


def test_a_small_host_bounds_its_mirror_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert on_card(CacheSpec(kv_sharers=2, card_sharers=2), host=10 * GIB) == 4 * GIB
    assert "room for 17.0 GiB of KV, the host for copies of 4.0 GiB: the host's bounds it" in caplog.text
    assert on_card(CacheSpec(kv_sharers=2, kv_host_share=0.5), host=10 * GIB) == int(2.5 * GIB)


def test_a_runner_that_copies_on_demand_takes_what_its_card_has_whatever_the_host_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def taken(cache: CacheSpec) -> int:
        return kv_bytes(cache, "cuda", 16 * GIB, lambda: H100, lambda: 10 * GIB, whole=False)

    caplog.set_level(logging.INFO, "baton.engine")
    assert taken(CacheSpec(kv_mirror="demand")) == on_card(CacheSpec())
    assert "copies of 8.0 GiB: the card's bounds it, and copies are made on demand" in caplog.text
    assert taken(CacheSpec()) == taken(CacheSpec(kv_mirror="whole")) == 8 * GIB


@pytest.mark.parametrize(
    ("mirror", "device", "copies"),
    [("whole", "cuda", None), ("demand", "cuda", 8 * GIB), ("demand", "cpu", None)],
)
def test_copies_are_made_on_demand_where_the_config_says_so(
    mirror: Literal["whole", "demand"], device: str, copies: int | None
) -> None:
    assert copied_on_demand(CacheSpec(kv_mirror=mirror), device, 10 * GIB) == copies


def test_which_memory_bounds_kv_is_said(caplog: pytest.LogCaptureFixture) -> None:
    room = kv_room(CacheSpec(kv_memory_share=0.5), H100, 16 * GIB, 100 * GIB)
    assert room == KvRoom(23 * GIB, 80 * GIB)
    assert room.told.endswith("23.0 GiB of KV, the host for copies of 80.0 GiB: the card's bounds it")
    caplog.set_level(logging.INFO, "baton.engine")
    on_card(CacheSpec(kv_memory_share=0.5), host=100 * GIB)
    assert "the card's bounds it; worker.kv_memory_share (0.5)" in caplog.text


def test_cards_that_hold_a_part_of_each_page_have_room_for_more_of_them() -> None:
    assert kv_room(CacheSpec(kv_memory_share=0.5), H100, 16 * GIB, 100 * GIB, 0.25) == KvRoom(92 * GIB, 80 * GIB)
    assert [kv_share(8, ranks) for ranks in (1, 2, 3, 16)] == [1, 1 / 2, 3 / 8, 1 / 8]


def test_a_card_without_room_beside_the_weights_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match=r"may take 34\.0 GiB, .* need 41\.0 GiB; raise worker\.kv_memory_share"
    ) as told:
        on_card(CacheSpec(card_sharers=2), weights=40 * GIB)
    assert told.value.param == "worker.kv_memory_share"
