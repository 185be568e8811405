"""Which part of a page each host of a worker's ranks sends: what its ranks write, and together the whole page."""

from __future__ import annotations

from contextlib import suppress

import msgspec
import pytest

from baton.engine.backends.ranks.hosts.layout import ranks_on
from baton.engine.backends.ranks.hosts.parts import parts_of_hosts, parts_read
from baton.engine.models import architectures
from baton.engine.program.ops import PagedAttention
from baton.engine.program.shares import Widths
from baton.kv.layout.extents import Heads, Part, part_bytes, part_of, require_whole, scatter
from baton.kv.layout.page import in_pages_of, layout_for
from baton.kv.layout.tables import by_window
from baton.protos.errors import ConfigError
from baton.protos.nouns import Extent
from tests.engine.test_models import program

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
@pytest.mark.parametrize("tokens", [16, 48])
def test_all_parts_are_the_page_of_every_architecture_or_the_lead_sends_all(model_type: str, tokens: int) -> None:
    found = program(model_type)
    layout = in_pages_of(layout_for("int8" if tokens == 48 else "float32", found.groups), tokens)
    for widths, hosts in WIDTHS:
        with suppress(ConfigError):  # of widths that this model can't have
            widths.require(found)
            parts = parts_of_hosts(found, widths, hosts, layout)
            if parts:
                assert len(parts) == hosts
                assert parts[0], "the lead's host takes part"
                require_whole(tuple(filter(None, parts)), layout.page_bytes)


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


@pytest.mark.parametrize("model_type", architectures())
def test_a_host_reads_all_that_it_writes_of_every_architecture(model_type: str) -> None:
    found = program(model_type)
    layout = layout_for("int8", found.groups)
    for widths, hosts in WIDTHS:
        with suppress(ConfigError):  # of widths that this model can't have
            widths.require(found)
            sent, read = (parts(found, widths, hosts, layout) for parts in (parts_of_hosts, parts_read))
            assert len(read) == hosts
            for host, part in enumerate(sent):
                assert covered(part, layout.page_bytes) <= covered(read[host], layout.page_bytes)
            for host in range(hosts):
                for rank in ranks_on(widths.count, hosts, host):
                    share = widths.share(found, rank)
                    of = {op.layer: share.own_kv for op in share.program.ops if isinstance(op, PagedAttention)}
                    wanted = covered(part_of(layout, of), layout.page_bytes)
                    assert wanted <= covered(read[host], layout.page_bytes)


def covered(part: Part, page_bytes: int) -> set[int]:
    """The bytes of a part, by their places in a page."""
    held = bytearray(page_bytes)
    scatter(memoryview(bytes([1]) * part_bytes(part)), memoryview(held), part)
    return {at for at, byte in enumerate(held) if byte}


@pytest.mark.parametrize(
    ("model_type", "widths"),
    [("deepseek_v3", Widths(tp=2)), ("llama", Widths(tp=2)), ("llama", Widths(tp=1))],
    ids=["latents", "one KV head", "one host"],
)
def test_where_one_host_has_all_its_lead_sends_whole_pages(model_type: str, widths: Widths) -> None:
    found = program(model_type, num_key_value_heads=1) if model_type == "llama" else program(model_type)
    layout = layout_for("float32", found.groups)
    assert parts_of_hosts(found, widths, min(2, widths.count), layout) == ()


def test_states_pages_of_windows_and_shards_are_the_leads_to_send() -> None:
    mixed = program("gpt_oss", num_hidden_layers=4)
    windowed = by_window(layout_for("float32", mixed.groups))
    assert windowed.windows
    assert parts_of_hosts(mixed, Widths(tp=2), 2, windowed) == ()
    whole = (Extent(0, windowed.page_bytes, 0, 1),)
    assert parts_read(mixed, Widths(tp=2), 2, windowed) == (whole, whole)
    hybrid = program("qwen3_next")
    kept = msgspec.structs.replace(layout_for("float32", hybrid.groups), states=hybrid.states)
    assert parts_of_hosts(hybrid, Widths(tp=2), 2, kept) == ()
    shard = msgspec.structs.replace(LAYOUT, shard_rank=1, shard_count=2)
    assert parts_of_hosts(LLAMA, Widths(tp=2), 2, shard) == ()
