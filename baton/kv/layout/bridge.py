"""Converts KV pages from a sender's layout to a receiver's: dtype, subset of heads, quantized on the wire.

Knows nothing of frames, leases or tokens. The sender converts everything but the codec's last step: what arrives
is a page in the receiver's layout, or that page coded. ``fidelity`` names the kind of KV. It is in the root of
every block hash, so KV that went through a codec is never found as exact KV.

    fidelity   "bfloat16"        exact blocks of that dtype; nothing lossy is taken in
               "bfloat16~int8"   blocks may have been through the int8 wire codec; int8 is what is sent here

A page is a sequence of runs of 16 tokens (page.py), and so is a coded page: everything in this module is done run
by run. Pages of another size are composed of other runs (repaging.py says of which).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from baton.kv.layout.codecs import from_float32, to_float32
from baton.kv.layout.coding import NAMES, coded_bytes, decode, encode
from baton.kv.layout.page import ITEM_BYTES, differences, group_bytes, in_pages_of, unknown_planes
from baton.kv.layout.selection import observed_of
from baton.kv.layout.tables import alike
from baton.protos.errors import ConfigError, LayoutMismatch
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, LayerGroup

FLOATS = ("float32", "bfloat16", "float16")
NARROWER = {"float32": ("float32", "bfloat16", "float16"), "bfloat16": ("bfloat16",), "float16": ("float16",)}


def with_codec(layout: KvLayout, codec: str) -> KvLayout:
    """Returns ``layout`` with ``codec`` in its fidelity, for a worker that receives KV coded; unchanged if
    ``codec`` is "none".

    Raises ConfigError if the codec is unknown or can't code this layout.
    """
    if codec == "none":
        return layout
    if codec not in NAMES:
        raise ConfigError(
            f"worker.kv_codec {codec!r} is unknown; choose one of none, {', '.join(NAMES)}", "worker.kv_codec"
        )
    if layout.states:
        text = f"worker.kv_codec {codec} codes K and V, and this model keeps recurrent state too; set it to none"
        raise ConfigError(text, "worker.kv_codec")
    if layout.dtype not in FLOATS or layout.fidelity != layout.dtype:
        raise ConfigError(
            f"worker.kv_codec {codec} codes float KV, and this worker keeps {layout.fidelity}; set it to none",
            "worker.kv_codec",
        )
    return msgspec.structs.replace(layout, fidelity=f"{layout.fidelity}~{codec}")


def codec_of(layout: KvLayout) -> str:
    """Returns the name of the wire codec by which a worker of ``layout`` receives KV, "" for none."""
    return layout.fidelity.partition("~")[2]


def wire_bytes(layout: KvLayout) -> int:
    """Returns the size in bytes of one block as it is sent to a worker of ``layout``, coded if it has a codec."""
    if not codec_of(layout):
        return layout.page_bytes
    return layout.runs * sum(coded_bytes(codec_of(layout), group) for group in layout.groups)


class Bridge:
    """Converts pages of layout ``sender`` into blocks as layout ``receiver`` takes them.

    ``unit`` is the size in bytes of a converted block; ``as_they_are`` is true if runs are only regrouped, not
    converted. Raises LayoutMismatch naming the differences that can't be converted.
    """

    def __init__(self, sender: KvLayout, receiver: KvLayout) -> None:
        _check(sender, receiver)
        self.sender, self.receiver = sender, receiver
        self.unit = wire_bytes(receiver)
        self.as_they_are = run_of(sender) == run_of(receiver) and not codec_of(receiver)

    def convert(self, page: memoryview) -> memoryview:
        """Returns one converted block, ``unit`` bytes of new memory, from a sender's ``page`` with as many tokens
        as a receiver's page has.
        """
        return self.gather(runs_of(page, self.sender))

    def gather(self, runs: Sequence[memoryview]) -> memoryview:
        """Returns one of the receiver's blocks, ``unit`` bytes, made of the sender's ``runs`` of 16 tokens; missing
        runs at its end are zeros.
        """
        parts: list[bytes | memoryview] = []
        for run in runs:
            parts += [run] if self.as_they_are else self._converted(run)
        whole = b"".join(parts)
        return memoryview(whole + bytes(self.unit - len(whole)))

    def _converted(self, run: memoryview) -> list[bytes]:
        """Returns one run of the receiver's, in parts."""
        parts: list[bytes] = []
        for values, group in self._groups(run):
            if codec := codec_of(self.receiver):
                parts.append(encode(codec, values, group))
            else:
                parts.append(from_float32(values, self.receiver.dtype).tobytes())
        return parts

    def _groups(self, run: memoryview) -> Iterator[tuple[np.ndarray, LayerGroup]]:
        """Yields, of each layer group, the float32 values of the receiver's heads, [layer x plane x
        token][head][head_dim], and the receiver's group.
        """
        at = 0
        for ours, theirs in zip(self.sender.groups, self.receiver.groups, strict=True):
            size = group_bytes(self.sender.dtype, ours)
            values = to_float32(run[at : at + size], self.sender.dtype)
            first = _first_head(self.receiver, theirs) - _first_head(self.sender, ours)
            yield values.reshape(-1, ours.kv_heads, ours.head_dim)[:, first : first + theirs.kv_heads], theirs
            at += size


def land(wire: memoryview, page: memoryview, layout: KvLayout) -> None:
    """Decodes a received block, in the codec of ``layout``, into ``page``."""
    for coded, run in zip(_split(wire, layout.runs), runs_of(page, layout), strict=True):
        _land_run(coded, run, layout)


def _land_run(wire: memoryview, page: memoryview, layout: KvLayout) -> None:
    codec, at, to = codec_of(layout), 0, 0
    for group in layout.groups:
        size = coded_bytes(codec, group)
        values = from_float32(decode(codec, wire[at : at + size], group), layout.dtype)
        at += size
        page[to : to + values.nbytes] = values.tobytes()
        to += values.nbytes


def land_part(wire: memoryview, page: memoryview, part: KvLayout, whole: KvLayout) -> None:
    """Writes a received block with the heads of layout ``part`` (one shard's) to their places in ``page`` of layout
    ``whole``, decoding it if it is coded.
    """
    held = memoryview(bytearray(part.page_bytes)) if codec_of(part) else wire
    if codec_of(part):
        land(wire, held, part)
    for some, all_of in zip(runs_of(held, part), runs_of(page, whole), strict=True):
        _land_heads(some, all_of, part, whole)


def _land_heads(held: memoryview, page: memoryview, part: KvLayout, whole: KvLayout) -> None:
    """Copies one run of ``part`` to its heads' places in a run of ``whole``."""
    item, at, to = np.dtype(f"u{ITEM_BYTES[part.dtype]}"), 0, 0
    for some, all_of in zip(part.groups, whole.groups, strict=True):
        size, room = group_bytes(part.dtype, some), group_bytes(whole.dtype, all_of)
        values = np.frombuffer(held[at : at + size], item).reshape(-1, some.kv_heads, some.head_dim)
        into = np.frombuffer(page[to : to + room], item).reshape(-1, all_of.kv_heads, all_of.head_dim)
        first = _first_head(part, some) - _first_head(whole, all_of)
        into[:, first : first + some.kv_heads] = values
        at, to = at + size, to + room


def shard_of(layout: KvLayout, rank: int, count: int) -> KvLayout:
    """Returns the layout of the part of ``layout``'s heads that shard ``rank`` of ``count`` has. Raises
    LayoutMismatch if it isn't a part of them, or can't be assembled from shards.
    """
    times, left = divmod(count, layout.shard_count)
    named = f"shard {rank} of {count}, the receiver is {layout.shard_rank} of {layout.shard_count}"
    if left or not times or rank // times != layout.shard_rank:
        raise LayoutMismatch(f"the blocks are of {named}: no part of it", "shard_rank")
    if times == 1:
        return layout
    if layout.states:
        raise LayoutMismatch(f"the blocks are of {named}: recurrent state isn't gathered of shards", "shard_count")
    if layout.dtype not in FLOATS or any(group.kv_heads % times for group in layout.groups):
        heads = ", ".join(str(group.kv_heads) for group in layout.groups)
        raise LayoutMismatch(
            f"the blocks are of {named}: pages of {layout.dtype} with {heads} KV heads aren't gathered of {times}; "
            "use float KV and a number of shards that divides the heads",
            "shard_count",
        )
    groups = tuple(msgspec.structs.replace(group, kv_heads=group.kv_heads // times) for group in layout.groups)
    page_bytes = layout.runs * sum(group_bytes(layout.dtype, group) for group in groups)
    return msgspec.structs.replace(layout, groups=groups, page_bytes=page_bytes, shard_rank=rank, shard_count=count)


def wire_layout(sender: KvLayout, receiver: KvLayout) -> KvLayout:
    """Returns the layout in which blocks of ``sender`` travel: ``receiver``, or the part of it that a sender with
    fewer heads has. Raises LayoutMismatch if there is no such part.
    """
    if sender.shard_count <= receiver.shard_count:
        return receiver
    return shard_of(receiver, sender.shard_rank, sender.shard_count)


@functools.lru_cache(maxsize=4096)
def can_ship(sender: KvLayout, receiver: KvLayout) -> bool:
    """Returns whether blocks of one sender of layout ``sender`` contain all that ``receiver`` needs, unchanged or
    converted.
    """
    return sender == receiver or not any(_obstacles(*alike(sender, receiver)))


def obstacles_between(sender: KvLayout, receiver: KvLayout) -> str:
    """Returns every difference because of which ``can_ship`` is False, joined; "" if it is True."""
    return "" if sender == receiver else "; ".join(_obstacles(*alike(sender, receiver)))


def bridge(sender: KvLayout, receiver: KvLayout) -> Bridge | None:
    """Returns the converter of pages of ``sender`` for ``receiver``; None if they are sent unchanged. Raises
    LayoutMismatch if they can't be converted.
    """
    if sender == receiver and not codec_of(receiver):
        return None
    return Bridge(sender, receiver)


def run_of(layout: KvLayout) -> KvLayout:
    """Returns ``layout`` with pages of 16 tokens, one run each."""
    return in_pages_of(layout, BLOCK_TOKENS)


def runs_of(page: memoryview, layout: KvLayout) -> list[memoryview]:
    """Returns the runs of 16 tokens of a ``page`` of ``layout``, as views."""
    return _split(page, layout.runs)


def _split(view: memoryview, parts: int) -> list[memoryview]:
    size = len(view) // parts
    return [view[at : at + size] for at in range(0, parts * size, size)]


def _first_head(layout: KvLayout, group: LayerGroup) -> int:
    """Returns the index, in the model, of the first KV head of the layout's shard."""
    return layout.shard_rank * group.kv_heads


def _check(sender: KvLayout, receiver: KvLayout) -> None:
    found = list(_obstacles(sender, receiver))
    if found:
        raise LayoutMismatch(
            f"KV can't be brought from the sender's layout to the receiver's: {'; '.join(found)}", "layout"
        )


def _obstacles(sender: KvLayout, receiver: KvLayout) -> Iterator[str]:
    """Yields a description of every difference that can't be bridged."""
    for side, layout in (("sender", sender), ("receiver", receiver)):
        yield from unknown_planes(layout, side)
        if layout.block_tokens < BLOCK_TOKENS or layout.block_tokens % BLOCK_TOKENS:
            yield f"block_tokens: {side}'s pages of {layout.block_tokens} tokens aren't runs of {BLOCK_TOKENS}"
            return
        if layout.page_bytes != layout.runs * sum(group_bytes(layout.dtype, group) for group in layout.groups):
            yield f"page_bytes: {side}'s {layout.page_bytes} aren't {layout.block_tokens} tokens of its groups"
            return
    shards_only = msgspec.structs.replace(
        sender, dtype=receiver.dtype, groups=receiver.groups, page_bytes=receiver.page_bytes,
        fidelity=receiver.fidelity, shard_rank=receiver.shard_rank, shard_count=receiver.shard_count,
        block_tokens=receiver.block_tokens,
    )  # fmt: skip
    yield from differences(shards_only, receiver)
    if sender.block_tokens != receiver.block_tokens and observed_of(receiver) is not None:
        yield f"block_tokens: pages chosen by {sender.block_tokens} tokens aren't {receiver.block_tokens} tokens'"
    if sender.block_tokens != receiver.block_tokens and receiver.windows:
        yield "block_tokens: pages of layers with a window aren't made of pages of another size"
    yield from _unbridged_state(sender, receiver)
    yield from _dtypes(sender, receiver)
    if len(sender.groups) != len(receiver.groups):
        yield f"groups: sender has {len(sender.groups)}, receiver {len(receiver.groups)}"
        return
    for number, (ours, theirs) in enumerate(zip(sender.groups, receiver.groups, strict=True)):
        yield from _group(number, ours, theirs, sender, receiver)


def _unbridged_state(sender: KvLayout, receiver: KvLayout) -> Iterator[str]:
    """Yields what keeps recurrent state, which is sent unchanged, from being sent: it fills pages of the sender's
    size.
    """
    if not sender.states or sender.states != receiver.states:
        return
    for field in ("page_bytes", "block_tokens", "dtype", "shard_count"):
        ours, theirs = getattr(sender, field), getattr(receiver, field)
        if ours != theirs:
            yield f"{field}: recurrent state isn't bridged from {ours!r} to {theirs!r}"


def _dtypes(sender: KvLayout, receiver: KvLayout) -> Iterator[str]:
    exact, _, lossy = sender.fidelity.partition("~")
    kept, _, taken = receiver.fidelity.partition("~")
    if (
        sender.dtype not in FLOATS
        or receiver.dtype not in FLOATS
        or exact != sender.dtype
        or kept != receiver.dtype
    ):
        if (sender.dtype, sender.fidelity) != (receiver.dtype, receiver.fidelity):
            yield f"fidelity: sender {sender.fidelity!r}, receiver {receiver.fidelity!r}"
        return
    if receiver.dtype not in NARROWER[sender.dtype]:
        yield f"dtype: {receiver.dtype} pages would claim a precision that {sender.dtype} blocks don't have"
    if lossy and lossy != taken:
        yield f"fidelity: blocks that may have been through {lossy} are not taken as {receiver.fidelity!r}"


def _group(
    number: int, ours: LayerGroup, theirs: LayerGroup, sender: KvLayout, receiver: KvLayout
) -> Iterator[str]:
    for field in LayerGroup.__struct_fields__:
        said, asked = getattr(ours, field), getattr(theirs, field)
        if field != "kv_heads" and said != asked:
            yield f"groups[{number}].{field}: sender {said!r}, receiver {asked!r}"
    if ours.kv_heads * sender.shard_count != theirs.kv_heads * receiver.shard_count:
        yield (
            f"groups[{number}].kv_heads: sender {ours.kv_heads} x {sender.shard_count} shards, "
            f"receiver {theirs.kv_heads} x {receiver.shard_count}"
        )
        return
    first, wanted = _first_head(sender, ours), _first_head(receiver, theirs)
    end, last = first + ours.kv_heads, wanted + theirs.kv_heads
    if not first <= wanted <= last <= end:
        yield (
            f"shards: shard {sender.shard_rank} of {sender.shard_count} holds heads {first}…{end - 1}, the "
            f"receiver (shard {receiver.shard_rank} of {receiver.shard_count}) needs {wanted}…{last - 1}; "
            "neither has all that the other has"
        )
