"""Defines how KV is laid out in a page, and compares the layouts of two workers. Torch-free.

Knows nothing of memory or of tensors. A page holds one block (a part of its layers where these have pages of their
own, ``tables.py``), group after group, and inside a group

    [layer][plane][token 0..15][kv_head][head_dim]        contiguous, in the dtype's native little-endian order

each plane of a scaled dtype (int8, fp8_e4m3) followed by [token 0..15][kv_head] float32 scales, so that a block is
contiguous on the wire as in memory. Kernels read runs of 16 tokens; a page of more tokens (``worker.block_tokens``)
consists of several such runs, so that page sizes are bridged run by run:

    page of 48     [run of 16: all of the above][run of 16][run of 16]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from baton.kv.layout.selection import selection_of
from baton.protos.errors import ConfigError, LayoutMismatch
from baton.protos.nouns import BLOCK_TOKENS, KvLayout, LayerGroup, StatePlane

# What a page may hold of a token; state: the paced engine's rows, tokens: token ids, of an encoder.
PLANES = ("k", "v", "latent", "state", "tokens")
STATES = ("conv", "delta", "ssm")  # names of the kinds of recurrent state that a sequence may keep
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8_e4m3": 1, "uint8": 1, "bytes": 1}
SCALE_BYTES = {"int8": 4, "fp8_e4m3": 4}  # bytes of the scale of a (token, kv_head) in each plane


def layout_for(
    dtype: str,
    layers: int | Sequence[LayerGroup],
    kv_heads: int = 0,
    head_dim: int = 0,
    fidelity: str | None = None,
    states: tuple[StatePlane, ...] = (),
) -> KvLayout:
    """Returns a KV layout with pages of 16 tokens.

    ``layers`` is a number of equal layers with planes k and v of ``kv_heads`` x ``head_dim``, or the layer groups.
    ``states`` are the planes of a sequence's recurrent state. ``fidelity`` defaults to ``dtype``. Raises
    ConfigError for an unknown dtype and for pages without any bytes.
    """
    if dtype not in ITEM_BYTES:
        raise ConfigError(f"KV dtype {dtype!r} is unknown; choose one of {', '.join(ITEM_BYTES)}", "dtype")
    if isinstance(layers, int):
        layers = (LayerGroup("full", ("k", "v"), layers, kv_heads, head_dim),)
    groups = tuple(layers)
    page_bytes = sum(group_bytes(dtype, group) for group in groups)
    if page_bytes < 1:
        raise ConfigError("a KV page would be empty: layers, kv_heads and head_dim must be at least 1", "groups")
    return KvLayout(dtype, groups, page_bytes, dtype if fidelity is None else fidelity, states=states)


def in_pages_of(layout: KvLayout, block_tokens: int) -> KvLayout:
    """Returns ``layout`` with ``block_tokens`` tokens per page. Raises ConfigError unless they are a positive
    multiple of 16.
    """
    if block_tokens < BLOCK_TOKENS or block_tokens % BLOCK_TOKENS:
        raise ConfigError(
            f"a page of {block_tokens} tokens can't be made: take a multiple of {BLOCK_TOKENS}",
            "worker.block_tokens",
        )
    page_bytes = layout.run_bytes * (block_tokens // BLOCK_TOKENS)
    return msgspec.structs.replace(layout, block_tokens=block_tokens, page_bytes=page_bytes)


def plane_bytes(dtype: str, group: LayerGroup) -> int:
    """Returns the bytes of one plane (k or v, say) of one layer of ``group`` in one run of 16 tokens, scales
    included.
    """
    row = group.head_dim * ITEM_BYTES[dtype] + SCALE_BYTES.get(dtype, 0)
    return BLOCK_TOKENS * group.kv_heads * row


def sliding_window(layout: KvLayout) -> int:
    """Returns how many tokens back any layer can attend, the token itself included; 0 if a layer attends to all.

    Attention sinks, which a selection keeps as well, are not counted (``sunk_blocks``).
    """
    if (selection := selection_of(layout)) is not None:
        return selection.reach
    windows = [group.window for group in layout.groups]
    return max(windows) if windows and all(windows) and not layout.states else 0


def sunk_blocks(layout: KvLayout) -> int:
    """Returns how many leading blocks hold attention sinks, which every later token sees whatever the window."""
    selection = selection_of(layout)
    return 0 if selection is None else selection.sunk(layout.block_tokens)


def group_bytes(dtype: str, group: LayerGroup) -> int:
    """Returns the bytes of all layers and planes of ``group`` in one run of 16 tokens."""
    return group.layers * len(group.planes) * plane_bytes(dtype, group)


def group_offsets(layout: KvLayout) -> list[int]:
    """Returns the byte offset of each layer group in a run of 16 tokens."""
    offsets, at = [], 0
    for group in layout.groups:
        offsets.append(at)
        at += group_bytes(layout.dtype, group)
    return offsets


def differences(sender: KvLayout, receiver: KvLayout) -> Iterator[str]:
    """Yields a description of each field in which the two layouts differ."""
    for field in KvLayout.__struct_fields__:
        ours, theirs = getattr(receiver, field), getattr(sender, field)
        if ours == theirs:
            continue
        if field == "groups" and len(ours) == len(theirs):
            yield from _group_differences(theirs, ours)
        elif field == "states":
            yield from _state_differences(theirs, ours)
        else:
            yield f"{field}: sender {theirs!r}, receiver {ours!r}"


def _group_differences(sender: tuple[LayerGroup, ...], receiver: tuple[LayerGroup, ...]) -> Iterator[str]:
    for number, (theirs, ours) in enumerate(zip(sender, receiver, strict=True)):
        for field in LayerGroup.__struct_fields__:
            said, asked = getattr(theirs, field), getattr(ours, field)
            if said != asked:
                yield f"groups[{number}].{field}: sender {said!r}, receiver {asked!r}"


def _state_differences(sender: tuple[StatePlane, ...], receiver: tuple[StatePlane, ...]) -> Iterator[str]:
    said, asked = ({plane.name: plane for plane in side} for side in (sender, receiver))
    for name in sorted({*said, *asked}):
        theirs, ours = said.get(name), asked.get(name)
        if theirs != ours:
            yield f"states[{name}]: sender {_size(theirs)}, receiver {_size(ours)}"
    if list(said) != list(asked) and said == asked:
        yield f"states: sender {list(said)}, receiver {list(asked)}"


def _size(plane: StatePlane | None) -> str:
    return "none" if plane is None else f"{plane.layers} layers of {' x '.join(map(str, plane.shape))}"


def keeps_tokens(layout: KvLayout) -> bool:
    """Returns whether pages hold token ids, as those of an encoder, which computes no KV."""
    return any("tokens" in group.planes for group in layout.groups)


def unknown_planes(layout: KvLayout, side: str) -> Iterator[str]:
    """Yields a description of each plane of ``layout`` that this version doesn't know; ``side`` ("sender" or
    "receiver") names the layout in it.
    """
    for number, group in enumerate(layout.groups):
        for plane in set(group.planes) - set(PLANES):
            yield f"groups[{number}].planes: {side}'s {plane!r} is unknown here"
    for plane in {state.name for state in layout.states} - set(STATES):
        yield f"states: {side}'s {plane!r} is unknown here"


def require_same(sender: KvLayout, receiver: KvLayout) -> None:
    """Raises LayoutMismatch, naming each difference, unless pages of ``sender`` and ``receiver`` have the same
    bytes.
    """
    found = "; ".join([*unknown_planes(sender, "sender"), *differences(sender, receiver)])
    if found:
        raise LayoutMismatch(
            f"sender and receiver lay out KV differently ({found}). "
            "Start both workers with the same model and dtype.",
            "layout",
        )
