"""Says which part of each KV page the ranks of a host write, so that each host can send its own, and which they
read.

Knows nothing of connections or of who receives pages.
"""

from __future__ import annotations

from baton.engine.backends.ranks.hosts.layout import ranks_on
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.rank_program import BY_ROWS
from baton.engine.program.shares import Widths
from baton.kv.layout.extents import Heads, Part, part_of
from baton.protos.nouns import Extent, KvLayout


def parts_of_hosts(program: Program, widths: Widths, hosts: int, layout: KvLayout) -> tuple[Part, ...]:
    """Returns the part of a page of ``layout`` that each of ``hosts`` hosts has, and together they are the page.

    A host without a part of its own has (). It is () as a whole where one host has all, and where pages differ by
    the page table that they belong to, or hold recurrent state, which the lead's host alone has between steps.
    """
    if hosts == 1 or layout.states or layout.windows or layout.shard_count > 1:
        return ()
    if widths.share(program, 0).deal == BY_ROWS:  # every host has the keys and values of all
        owned = [_of_rows(program, layout, hosts, host) for host in range(hosts)]
    else:
        owned = _written(program, widths, hosts, layout)
    parts = tuple(part_of(layout, each) for each in owned)
    return parts if sum(map(bool, parts)) > 1 and parts[0] else ()


def parts_read(program: Program, widths: Widths, hosts: int, layout: KvLayout) -> tuple[Part, ...]:
    """Returns the part of a page of ``layout`` that the ranks of each of ``hosts`` hosts read.

    It is the whole page where ranks share rows, and where pages differ by the page table that they belong to.
    """
    undivided = layout.windows or layout.shard_count > 1 or widths.share(program, 0).deal == BY_ROWS
    if hosts == 1 or undivided:
        return ((Extent(0, layout.page_bytes, 0, 1),),) * hosts
    return tuple(part_of(layout, _read(program, widths, hosts, host, layout)) for host in range(hosts))


def _read(program: Program, widths: Widths, hosts: int, host: int, layout: KvLayout) -> dict[int, Heads]:
    """Returns the KV heads, by layer, that a rank of ``host`` reads, and those between them."""
    counts, found = _heads(layout), dict[int, Heads]()
    for rank in ranks_on(widths.count, hosts, host):
        share = widths.share(program, rank)
        for op in share.program.ops:
            if isinstance(op, p.RopeAppend | p.PagedAttention | p.LatentAttention):
                first, end = (0, counts[op.layer]) if isinstance(op, p.LatentAttention) else share.own_kv
                known = found.get(op.layer, (first, end))
                found[op.layer] = min(first, known[0]), max(end, known[1])
    return found


def _of_rows(program: Program, layout: KvLayout, hosts: int, host: int) -> dict[int, Heads]:
    counts = _heads(layout)
    return {layer: (0, counts[layer]) for layer in ranks_on(len(counts), hosts, host)}


def _written(program: Program, widths: Widths, hosts: int, layout: KvLayout) -> list[dict[int, Heads]]:
    """Returns the KV heads, by layer, that each host's ranks write; what several write is the first one's."""
    counts, seen, found = _heads(layout), dict[int, int](), list[dict[int, Heads]]()
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


def _heads(layout: KvLayout) -> list[int]:
    """Returns the number of KV heads of each layer, in the order of the page's layers."""
    return [group.kv_heads for group in layout.groups for _ in range(group.layers)]
