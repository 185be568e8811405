"""Says which part of each KV page the ranks of a host write, so that each host can send its own, and which they
read.

Knows nothing of connections or of who receives pages. Where layers with a window have pages of their own, a part is
one of every page, whichever layers it holds: that comes out where a host has the same of all layers.
"""

from __future__ import annotations

from baton.engine.backends.ranks.hosts.layout import ranks_on
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.rank_program import BY_ROWS
from baton.engine.program.shares import Widths
from baton.kv.layout.bridge import codec_of
from baton.kv.layout.extents import Heads, Part, part_of, without
from baton.kv.layout.tables import layers_of_page
from baton.protos.nouns import Extent, KvLayout


def parts_of_hosts(program: Program, widths: Widths, hosts: int, layout: KvLayout) -> tuple[Part, ...]:
    """Returns the part of a page of ``layout`` that each of ``hosts`` hosts has, and together they are the page.

    A host without a part of its own has (). It is () as a whole where one host has all, where a host has other
    layers in pages of one table than of another, and where pages hold recurrent state and don't come to each host
    in parts: then the lead's host alone has it between steps.
    """
    if hosts == 1 or layout.shard_count > 1:
        return ()
    if layout.states and not parts_received(program, widths, hosts, layout):
        return ()
    if widths.share(program, 0).deal == BY_ROWS:  # every host has the keys and values of all
        owned = [_of_rows(layout, hosts, host) for host in range(hosts)]
    else:
        of_tables = [_in_pages(program, layout, each) for each in _written(program, widths, hosts, layout)]
        owned = [each for each in of_tables if each is not None]
        if len(owned) < hosts:
            return ()
    parts = tuple(part_of(layout, each) for each in owned)
    return parts if sum(map(bool, parts)) > 1 and parts[0] else ()


def parts_read(program: Program, widths: Widths, hosts: int, layout: KvLayout) -> tuple[Part, ...]:
    """Returns the part of a page of ``layout`` that the ranks of each of ``hosts`` hosts read.

    It is the whole page of all hosts where ranks share rows, and where some host reads other layers in pages of one
    table than of another. With whole pages for that host alone, it would pass for the one that has what the lead
    lacks, and of layers that it doesn't read it isn't told what ranks write.
    """
    whole = (Extent(0, layout.page_bytes, 0, 1),)
    if hosts == 1 or layout.shard_count > 1 or widths.share(program, 0).deal == BY_ROWS:
        return (whole,) * hosts
    of_tables = [_in_pages(program, layout, _read(program, widths, hosts, host, layout)) for host in range(hosts)]
    found = tuple(part_of(layout, each) for each in of_tables if each is not None)
    return found if len(found) == hosts else (whole,) * hosts


def parts_received(program: Program, widths: Widths, hosts: int, layout: KvLayout) -> tuple[Part, ...]:
    """Returns the part of a page of ``layout`` that comes to each host straight from whoever sends it: what its
    ranks read.

    It is () as a whole where the lead's host receives all: on one host, where a codec or another worker's layout
    divides pages, or where a host's ranks read no page at all, because all of its layers keep recurrent state. A
    page of such state is divided like any other.
    """
    if hosts == 1 or layout.shard_count > 1 or codec_of(layout):
        return ()
    parts = parts_read(program, widths, hosts, layout)
    left = without((Extent(0, layout.page_bytes, 0, 1),), parts, layout.page_bytes)
    return parts if all(parts) and not (layout.states and left) else ()


def _read(program: Program, widths: Widths, hosts: int, host: int, layout: KvLayout) -> dict[int, Heads]:
    """Returns the KV heads, by layer's slot, that a rank of ``host`` reads, and those between them."""
    counts, found = _heads(program, layout), dict[int, Heads]()
    for rank in ranks_on(widths.count, hosts, host):
        share = widths.share(program, rank)
        for op in share.program.ops:
            if isinstance(op, p.RopeAppend | p.PagedAttention | p.LatentAttention):
                first, end = (0, counts[op.layer]) if isinstance(op, p.LatentAttention) else share.own_kv
                known = found.get(op.layer, (first, end))
                found[op.layer] = min(first, known[0]), max(end, known[1])
    return found


def _of_rows(layout: KvLayout, hosts: int, host: int) -> dict[int, Heads]:
    counts = _heads_of_page(layout)
    return {layer: (0, counts[layer]) for layer in ranks_on(len(counts), hosts, host)}


def _in_pages(program: Program, layout: KvLayout, owned: dict[int, Heads]) -> dict[int, Heads] | None:
    """Returns the heads ``owned``, by layer's slot, as those of a page's layers; None unless pages of all tables
    have the same.
    """
    layers, found = layers_of_page(layout), dict[int, Heads]()
    for slot, heads in owned.items():
        if found.setdefault(slot % layers, heads) != heads:
            return None
    all_slots = range(sum(group.layers for group in program.groups))
    return found if {slot for slot in all_slots if slot % layers in found} == owned.keys() else None


def _written(program: Program, widths: Widths, hosts: int, layout: KvLayout) -> list[dict[int, Heads]]:
    """Returns the KV heads, by layer's slot, that each host's ranks write; of several that write one, the first."""
    counts, seen, found = _heads(program, layout), dict[int, int](), list[dict[int, Heads]]()
    for host in range(hosts):
        ends = dict[int, int]()
        for rank in ranks_on(widths.count, hosts, host):
            share = widths.share(program, rank)
            for op in share.program.ops:
                if isinstance(op, p.RopeAppend | p.LatentAttention):
                    end = share.own_kv[1] if isinstance(op, p.RopeAppend) else counts[op.layer]
                    ends[op.layer] = max(end, ends.get(op.layer, 0))
        found.append({layer: (seen.get(layer, 0), end) for layer, end in ends.items() if end > seen.get(layer, 0)})
        seen |= {layer: end for layer, end in ends.items() if end > seen.get(layer, 0)}
    assert all(seen.get(layer) == count for layer, count in enumerate(counts)), "every head is some rank's"
    return found


def _heads(program: Program, layout: KvLayout) -> list[int]:
    """Returns the number of KV heads of each layer, by its slot: through the pages of all tables."""
    layers, of_page = sum(group.layers for group in program.groups), _heads_of_page(layout)
    return [of_page[slot % len(of_page)] for slot in range(layers)]


def _heads_of_page(layout: KvLayout) -> list[int]:
    return [group.kv_heads for group in layout.groups for _ in range(group.layers)]
