"""Which part of a page each host of a worker's ranks sends: what its ranks write, and together the whole page."""

from __future__ import annotations

from contextlib import suppress
from functools import reduce
from operator import or_

import msgspec
import pytest

from baton.engine.backends.ranks.hosts.layout import ranks_on
from baton.engine.backends.ranks.hosts.parts import parts_of_hosts, parts_read, parts_received
from baton.engine.models import architectures
from baton.engine.program.ops import PagedAttention
from baton.engine.program.shares import Widths
from baton.kv.layout.extents import Heads, Part, part_bytes, part_of, require_whole, scatter, without
from baton.kv.layout.page import in_pages_of, layout_for
from baton.kv.layout.tables import by_window, layers_of_page
from baton.protos.errors import ConfigError
from baton.protos.nouns import Extent
from tests.engine.test_models import program
from tests.thorough import later

LLAMA = program("llama", num_hidden_layers=5)  # 2 KV heads
LAYOUT = layout_for("bfloat16", LLAMA.groups)
WIDTHS = [
    (Widths(tp=2), 2),
    (Widths(tp=4), 3),
    (Widths(pp=2), 2),
    (Widths(pp=3), 2),
    (Widths(cp=3), 3),
    (Widths(ep=2), 2),
    (Widths(tp=2, pp=2), 4),
]


def heads(first: int, end: int, *layers: int) -> dict[int, Heads]:
    return dict.fromkeys(layers or range(5), (first, end))


@pytest.mark.parametrize(
    ("widths", "hosts", "owned"),
    [
        (Widths(tp=2), 2, [heads(0, 1), heads(1, 2)]),
        (Widths(tp=4), 2, [heads(0, 1), heads(1, 2)]),  # each head on two ranks
        (Widths(tp=4), 4, [heads(0, 1), {}, heads(1, 2), {}]),  # the first that has a head sends it
        (Widths(tp=4), 3, [heads(0, 1), {}, heads(1, 2)]),
        (Widths(cp=2), 2, [heads(0, 2, 0, 1), heads(0, 2, 2, 3, 4)]),  # both have all: layers are dealt
        (Widths(cp=3), 2, [heads(0, 2, 0, 1), heads(0, 2, 2, 3, 4)]),
    ],
    ids=str,
)
def test_a_host_sends_the_heads_that_its_ranks_write_or_layers_that_all_have(
    widths: Widths, hosts: int, owned: list[dict[int, Heads]]
) -> None:
    assert parts_of_hosts(LLAMA, widths, hosts, LAYOUT) == tuple(part_of(LAYOUT, each) for each in owned)


def test_a_host_sends_the_layers_of_its_stages() -> None:
    one, other = parts_of_hosts(LLAMA, Widths(pp=2), 2, LAYOUT)
    layer = LAYOUT.page_bytes // 5
    assert part_bytes(one) % layer == part_bytes(other) % layer == 0
    assert one[0].at == 0
    assert other[0].at == part_bytes(one)
    by_columns = parts_of_hosts(LLAMA, Widths(tp=2, pp=2), 4, LAYOUT)
    assert [2 * part_bytes(each) for each in by_columns] == [part_bytes(each) for each in (one, one, other, other)]


@pytest.mark.parametrize("model_type", architectures())
@pytest.mark.parametrize("tokens", [16, later(48)])
def test_all_parts_are_the_page_of_every_architecture_or_the_lead_sends_all(model_type: str, tokens: int) -> None:
    found = program(model_type)
    layout = in_pages_of(layout_for("int8" if tokens == 48 else "float32", found.groups), tokens)
    for widths, hosts in WIDTHS:
        with suppress(ConfigError):  # of widths that this model can't have
            widths.require(found)
            for each in {layout, by_window(layout) if tokens == 16 else layout}:
                parts = parts_of_hosts(found, widths, hosts, each)
                if parts:
                    assert len(parts) == hosts
                    assert parts[0], "the lead's host takes part"
                    require_whole(tuple(filter(None, parts)), each.page_bytes)


@pytest.mark.parametrize(
    ("widths", "hosts", "read"),
    [
        (Widths(tp=2), 2, [heads(0, 1), heads(1, 2)]),
        (Widths(tp=4), 4, [heads(0, 1), heads(0, 1), heads(1, 2), heads(1, 2)]),  # each head on two hosts
        (Widths(tp=4), 3, [heads(0, 1), heads(0, 1), heads(1, 2)]),
        (Widths(cp=2), 2, [heads(0, 2), heads(0, 2)]),
    ],
    ids=str,
)
def test_a_host_reads_the_heads_of_its_ranks_or_all_where_ranks_share_rows(
    widths: Widths, hosts: int, read: list[dict[int, Heads]]
) -> None:
    assert parts_read(LLAMA, widths, hosts, LAYOUT) == tuple(part_of(LAYOUT, each) for each in read)


@pytest.mark.parametrize("own_windows", [False, True])
@pytest.mark.parametrize("model_type", architectures())
def test_a_host_reads_all_that_it_writes_of_every_architecture(model_type: str, own_windows: bool) -> None:
    found = program(model_type)
    layout = layout_for("int8", found.groups)
    if own_windows and (layout := by_window(layout)) == layout_for("int8", found.groups):
        return
    layers = layers_of_page(layout)
    for widths, hosts in WIDTHS:
        with suppress(ConfigError):  # of widths that this model can't have
            widths.require(found)
            sent, read = (parts(found, widths, hosts, layout) for parts in (parts_of_hosts, parts_read))
            assert len(read) == hosts
            assert not without((Extent(0, layout.page_bytes, 0, 1),), read, layout.page_bytes), "each byte is read"
            covered_by = [covered(part, layout.page_bytes) for part in read]
            for host, part in enumerate(sent):
                assert covered(part, layout.page_bytes) | covered_by[host] == covered_by[host]
            for host in range(hosts):
                for rank in ranks_on(widths.count, hosts, host):
                    share = widths.share(found, rank)
                    attended = (op for op in share.program.ops if isinstance(op, PagedAttention))
                    of = {op.layer % layers: share.own_kv for op in attended}
                    wanted = covered(part_of(layout, of), layout.page_bytes)
                    assert wanted | covered_by[host] == covered_by[host]


def every_byte(page_bytes: int) -> int:
    """Returns what ``covered`` gives of a whole page."""
    return int.from_bytes(bytes([1]) * page_bytes, "little")


def covered(part: Part, page_bytes: int) -> int:
    """Returns a number with a bit for each byte of a page that belongs to ``part``."""
    held = bytearray(page_bytes)
    scatter(memoryview(bytes([1]) * part_bytes(part)), memoryview(held), part)
    return int.from_bytes(held, "little")


@pytest.mark.parametrize(
    ("model_type", "widths"),
    [("deepseek_v3", Widths(tp=2)), ("llama", Widths(tp=2)), ("llama", Widths(tp=1))],
    ids=["latents", "one KV head", "one host"],
)
def test_where_one_host_has_all_its_lead_sends_whole_pages(model_type: str, widths: Widths) -> None:
    found = program(model_type, num_key_value_heads=1) if model_type == "llama" else program(model_type)
    layout = layout_for("float32", found.groups)
    assert parts_of_hosts(found, widths, min(2, widths.count), layout) == ()


@pytest.mark.parametrize("layers", [4, 5])
def test_pages_of_windows_are_divided_where_a_host_has_the_same_of_all_layers(layers: int) -> None:
    mixed = program("gpt_oss", num_hidden_layers=layers)
    windowed = by_window(layout_for("float32", mixed.groups))
    assert windowed.windows
    each, whole = range(layers_of_page(windowed)), (Extent(0, windowed.page_bytes, 0, 1),)
    halves = tuple(part_of(windowed, dict.fromkeys(each, own)) for own in ((0, 1), (1, 2)))
    assert parts_of_hosts(mixed, Widths(tp=2), 2, windowed) == halves
    assert parts_received(mixed, Widths(tp=2), 2, windowed) == halves
    for stages in (Widths(pp=2), Widths(tp=2, pp=2)):
        if layers == 4:  # one layer of each kind in each stage
            own = tuple(part_of(windowed, {layer: (0, 2)}) for layer in each)
            assert parts_of_hosts(mixed, stages, 2, windowed) == own
            assert parts_received(mixed, stages, 2, windowed) == own
        else:
            assert parts_of_hosts(mixed, stages, 2, windowed) == (), "a stage's layers are others in each table"
            assert parts_received(mixed, stages, 2, windowed) == (whole, whole)
    deeper = program("gpt_oss", num_hidden_layers=8)  # a stage of 2, which has the same of both, and two of 3
    pages = by_window(layout_for("float32", deeper.groups))
    assert parts_received(deeper, Widths(pp=3), 3, pages) == ((Extent(0, pages.page_bytes, 0, 1),),) * 3
    dealt = parts_of_hosts(mixed, Widths(cp=2), 2, windowed)
    assert [part_bytes(part) for part in dealt] == [windowed.page_bytes // 2] * 2
    assert parts_received(mixed, Widths(ep=2), 2, windowed) == (whole, whole)


@pytest.mark.parametrize("model_type", ["qwen3_next", "bamba", "nemotron_h", "jamba", "granitemoehybrid"])
def test_pages_beside_states_are_divided_unless_a_host_reads_none(model_type: str) -> None:
    hybrid = program(model_type)
    kept = msgspec.structs.replace(layout_for("float32", hybrid.groups), states=hybrid.states)
    for widths, hosts in WIDTHS:
        with suppress(ConfigError):  # of widths that this model can't have
            widths.require(hybrid)
            sent, come = (parts(hybrid, widths, hosts, kept) for parts in (parts_of_hosts, parts_received))
            assert all(come)
            if come:
                assert reduce(or_, (covered(part, kept.page_bytes) for part in come)) == every_byte(kept.page_bytes)
            if sent:
                assert come, "what is lent for sending is brought back where it is read"
                require_whole(tuple(filter(None, sent)), kept.page_bytes)
    assert parts_received(hybrid, Widths(tp=2), 2, kept)


def test_shards_are_the_leads_to_send() -> None:
    shard = msgspec.structs.replace(LAYOUT, shard_rank=1, shard_count=2)
    assert parts_of_hosts(LLAMA, Widths(tp=2), 2, shard) == ()
