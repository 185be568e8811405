"""The checks of latent attention, grouped routing, gates and recurrences, as functions of a library.

Knows nothing of pytest. The oracles are each ``reference.py`` in float64, or float32 where one rounds inside.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from baton.engine.backends.native import span_structs as s
from baton.engine.backends.span_ops import delta_parts
from baton.engine.program.ops import GatedDelta
from baton.kernels.abi.native import I32, I64, P, declare
from baton.kernels.combine.reference import combine
from baton.kernels.gated_delta.reference import gated_delta
from baton.kernels.latent_attention.reference import latent_attention, latent_rows, rotate_heads
from baton.kernels.rms_norm.reference import normed
from baton.kernels.route.reference import route
from baton.kernels.state_space.reference import state_space
from baton.kernels.step.structs import ITEM, KV_TYPES

Check = Callable[[ctypes.CDLL], None]

CLOSE = {torch.float32: 2e-5, torch.bfloat16: 4e-3, torch.float16: 1e-3}  # of the largest output
SPANS = ((0, 5), (37, 1), (70, 20))  # (start, queries) of sequences in a step


def near(found: Tensor, wanted: Tensor, most: float = 2e-5) -> None:
    assert bool(torch.isfinite(found).all())
    assert float((found.double() - wanted.double()).abs().max() / wanted.abs().max()) < most


def items_of(spans: Sequence[tuple[int, int]], tables: Sequence[np.ndarray]) -> np.ndarray:
    firsts = np.cumsum([0, *(queries for _, queries in spans)])[:-1]
    rows = [
        (first, table.ctypes.data, queries, start)
        for first, table, (start, queries) in zip(firsts, tables, spans, strict=True)
    ]
    return np.array(rows, ITEM)


# ---- latents ----


class Latents:
    """Makes a case of latent attention; pages that nobody has are NaN."""

    def __init__(self, heads: int, rank: int, stored: torch.dtype, paired: bool, spans=SPANS) -> None:
        torch.manual_seed(heads + rank)
        self.heads, self.rank, self.stored, self.paired, self.spans = heads, rank, stored, paired, spans
        self.plain, self.rotary, self.value, self.scale = 12, 6, 9, 0.17
        self.rows, width = sum(queries for _, queries in spans), rank + self.rotary
        self.q = torch.randn(self.rows, heads * (self.plain + self.rotary))
        self.latent, self.norm = torch.randn(self.rows, width), torch.rand(rank) + 0.5
        self.expand = torch.randn(heads * (self.plain + self.value), rank) / rank**0.5
        self.place, self.bytes = 64, 64 + 16 * width * stored.itemsize + 32
        counts = [-(-(start + queries) // 16) for start, queries in spans]
        shuffled = torch.randperm(sum(counts)).to(torch.int32).numpy()
        self.tables = [np.ascontiguousarray(part) for part in np.split(shuffled, np.cumsum(counts)[:-1])]
        self.memory = torch.full((sum(counts), self.bytes), 0xFF, dtype=torch.uint8)
        for (start, _), table in zip(spans, self.tables, strict=True):
            self._put(table, 0, torch.randn(start, width).to(stored))
        angles = torch.arange(128)[:, None] * 0.1 ** torch.arange(self.rotary // 2)
        self.rope_angles = torch.cat((angles.cos(), angles.sin()), 1).contiguous()

    def plane(self, table: np.ndarray) -> Tensor:
        part = self.memory[torch.from_numpy(table).long(), self.place : self.place + self.bytes - 96]
        return part.contiguous().view(self.stored).view(len(table) * 16, -1)

    def _put(self, table: np.ndarray, start: int, rows: Tensor) -> None:
        for at, row in enumerate(rows, start):
            begin = self.place + at % 16 * row.numel() * row.itemsize
            into = self.memory[int(table[at // 16])]
            into[begin : begin + row.numel() * row.itemsize] = row.contiguous().view(torch.uint8)

    def run(self, library: ctypes.CDLL, only: slice = slice(None)) -> Tensor:
        out = torch.full((self.rows, self.heads * self.value), torch.nan)
        sizes = self.heads, self.plain, self.rotary, self.value, self.rank, self.paired
        kind = KV_TYPES[str(self.stored).removeprefix("torch.")]
        op = s.LatentStruct(
            self.norm.data_ptr(), self.expand.data_ptr(), self.place, 0, kind, *sizes, 1e-6, self.scale
        )
        rows = s.LatentRows(self.q.data_ptr(), self.latent.data_ptr(), self.q.shape[1], self.latent.shape[1],
                            out.data_ptr(), out.shape[1])  # fmt: skip
        items = items_of(self.spans, self.tables)[only]
        call = declare(library, "latent_attention", P, P, I32, P, I64, P, I64, P)
        call(ctypes.addressof(op), items.ctypes.data, len(items), self.memory.data_ptr(), self.bytes,
             self.rope_angles.data_ptr(), self.rope_angles.shape[1], ctypes.addressof(rows))  # fmt: skip
        return out

    def wanted(self) -> Tensor:
        outs, first = [], 0
        for (start, queries), table in zip(self.spans, self.tables, strict=True):
            half = self.rope_angles[start : start + queries].double().unflatten(1, (2, -1))
            cos = torch.cat((half[:, 0], half[:, 0]), -1)[:, None]
            sin = torch.cat((-half[:, 1], half[:, 1]), -1)[:, None]
            rows = slice(first, first + queries)
            made = latent_rows(self.latent[rows].double(), self.norm.double(), 1e-6, cos, sin, self.paired)
            kept = torch.cat((self.plane(table)[:start].double(), made.to(self.stored).double()))
            q = self.q[rows].double().unflatten(1, (self.heads, -1))
            asked = torch.cat((q[..., : self.plain], rotate_heads(q[..., self.plain :], cos, sin, self.paired)), -1)
            expand = self.expand.double().view(self.heads, -1, self.rank)
            outs.append(latent_attention(asked, kept, start, expand, self.rank, self.scale).flatten(1))
            first += queries
        return torch.cat(outs)


def latents_are_the_references(library: ctypes.CDLL) -> None:
    for heads, rank, stored, paired in ((1, 16, torch.float32, False), (6, 40, torch.float32, True),
                                        (9, 33, torch.bfloat16, True), (2, 20, torch.float16, False)):  # fmt: skip
        case = Latents(heads, rank, stored, paired)
        wanted = case.wanted()
        near(case.run(library), wanted, CLOSE[stored])


def a_sequence_is_its_own(library: ctypes.CDLL) -> None:
    case = Latents(5, 24, torch.float32, False)
    together = case.run(library)
    alone = case.run(library, slice(2, 3))
    assert torch.equal(together[6:], alone[6:])


def narrow_expansions_are_read_as_they_are(library: ctypes.CDLL) -> None:
    for dtype, code in ((torch.bfloat16, 1), (torch.float16, 2)):
        _reads_expansions(library, dtype, code)


def _reads_expansions(library: ctypes.CDLL, dtype: torch.dtype, code: int) -> None:
    case = Latents(3, 40, torch.float32, False)
    case.expand = case.expand.to(dtype).float()
    wanted = case.run(library)
    narrow, op = case.expand.to(dtype), s.LatentStruct
    case.expand = narrow
    found = torch.full_like(wanted, torch.nan)
    sizes = case.heads, case.plain, case.rotary, case.value, case.rank, case.paired
    struct = op(case.norm.data_ptr(), narrow.data_ptr(), case.place, code, 0, *sizes, 1e-6, case.scale)
    rows = s.LatentRows(case.q.data_ptr(), case.latent.data_ptr(), case.q.shape[1], case.latent.shape[1],
                        found.data_ptr(), found.shape[1])  # fmt: skip
    items = items_of(case.spans, case.tables)
    call = declare(library, "latent_attention", P, P, I32, P, I64, P, I64, P)
    call(ctypes.addressof(struct), items.ctypes.data, len(items), case.memory.data_ptr(), case.bytes,
         case.rope_angles.data_ptr(), case.rope_angles.shape[1], ctypes.addressof(rows))  # fmt: skip
    assert torch.equal(found, wanted)


# ---- experts and gates ----


def routes_are_the_references(library: ctypes.CDLL) -> None:
    for experts, chosen, groups, kept, best, sigmoid, renormalise in (
        (8, 2, 1, 1, 1, False, False),
        (24, 5, 4, 2, 2, True, True),
        (24, 3, 6, 3, 1, False, True),
    ):
        torch.manual_seed(experts + chosen)
        logits, bias = torch.randn(7, experts), torch.randn(experts) if sigmoid else None
        out, factor = torch.full_like(logits, torch.nan), torch.full((7, 1), torch.nan)
        at = None if bias is None else bias.data_ptr()
        op = s.RouteStruct(at, experts, chosen, groups, kept, best, sigmoid, renormalise, 1.7)
        call = declare(library, "route", P, P, I64, P, P)
        call(ctypes.addressof(op), logits.data_ptr(), 7, out.data_ptr(), factor.data_ptr())
        of = "sigmoid" if sigmoid else "softmax", chosen, groups, kept, best, renormalise, 1.7
        wanted, by = route(logits, bias, *of)
        assert torch.equal(out.isneginf(), wanted.isneginf())
        near(out.exp(), wanted.exp())
        near(factor, by)


def gates_are_the_references(library: ctypes.CDLL) -> None:
    torch.manual_seed(1)
    rows, n = 5, 37
    mixed, shared, factor, gate = (
        torch.randn(rows, n),
        torch.randn(rows, n),
        torch.randn(rows, 1),
        torch.randn(rows, 1),
    )
    call = declare(library, "combine", P, P, P, P, I64, I64, P)
    for by, opened in ((factor, gate), (None, None)):
        out = torch.full_like(mixed, torch.nan)
        at = (None if x is None else x.data_ptr() for x in (by, opened))
        call(mixed.data_ptr(), next(at), shared.data_ptr(), next(at), rows, n, out.data_ptr())
        near(out, combine(mixed, by, shared, opened))
    out = torch.full_like(mixed, torch.nan)
    declare(library, "gate", P, P, I64, I64, P)(mixed.data_ptr(), shared.data_ptr(), rows, n, out.data_ptr())
    near(out, shared.sigmoid() * mixed)
    heads, width, rest = 3, 5, 7
    x = torch.randn(rows, 2 * heads * width + rest)
    out, beside = torch.empty(rows, heads * width + rest), torch.empty(rows, heads * width)
    call = declare(library, "gated_heads", P, I64, I64, I64, I64, P, P)
    call(x.data_ptr(), rows, heads, width, rest, out.data_ptr(), beside.data_ptr())
    q, gates = x[:, : 2 * heads * width].unflatten(1, (heads, 2, width)).unbind(2)
    assert torch.equal(out, torch.cat((q.flatten(1), x[:, 2 * heads * width :]), 1))
    assert torch.equal(beside, gates.flatten(1))


# ---- recurrences ----

COUNTS = (5, 1, 70)  # rows of the sequences in a step
TAPS = 4
ALL = slice(None)


def stepped(counts: Sequence[int]) -> np.ndarray:
    return items_of([(0, count) for count in counts], [np.zeros(1, np.int32)] * len(counts))


class Deltas:
    """Makes a case of the gated delta rule."""

    def __init__(
        self, grouped: bool, key_heads: int = 2, value_heads: int = 6, key_dim: int = 20, value_dim: int = 24
    ):
        torch.manual_seed(value_dim)
        of = key_heads, value_heads, key_dim, value_dim, grouped
        self.op = GatedDelta("m", "g", 0, "conv", "a", "dt", "n", *of, 1e-6, "o")
        self.channels = 2 * key_heads * key_dim + value_heads * value_dim
        rows = sum(COUNTS)
        self.mixed = torch.randn(rows, self.channels + value_heads * value_dim)
        self.gates = torch.randn(rows, 2 * value_heads)
        self.conv = torch.randn(self.channels, TAPS)
        self.a_log, self.dt_bias = torch.rand(value_heads), torch.randn(value_heads)
        self.norm = torch.rand(value_dim) + 0.5
        self.past = torch.randn(len(COUNTS), self.channels, TAPS - 1)
        self.state = torch.randn(len(COUNTS), value_heads, key_dim, value_dim)

    def run(
        self, library: ctypes.CDLL, counts: Sequence[int] = COUNTS, rows: slice = ALL, of: slice = ALL
    ) -> tuple[Tensor, Tensor]:
        past, state = self.past[of].clone(), self.state[of].clone()
        kept = torch.cat((past.flatten(1), state.flatten(1)), 1).contiguous()
        states = s.StatesStruct(kept.data_ptr(), kept.shape[1] * 4)
        mixed, gates, taps = self.mixed[rows].contiguous(), self.gates[rows].contiguous(), self.conv.T.contiguous()
        fade, op = self.a_log.exp(), self.op
        sizes = TAPS, op.key_heads, op.value_heads, op.key_dim, op.value_dim, op.grouped
        at = (x.data_ptr() for x in (taps, fade, self.dt_bias, self.norm))
        width = op.value_heads * op.value_dim
        struct = s.GatedDeltaStruct(ctypes.addressof(states), *at, 0, past[0].numel() * 4, *sizes, op.eps, width)
        out, items = torch.full((len(mixed), width), torch.nan), stepped(counts)
        call = declare(library, "gated_delta", P, P, I32, I64, P, P, P)
        rows_at = mixed.data_ptr(), gates.data_ptr(), out.data_ptr()
        call(ctypes.addressof(struct), items.ctypes.data, len(items), len(mixed), *rows_at)
        return out, kept

    def wanted(self) -> tuple[Tensor, Tensor]:
        op, outs, first = self.op, [], 0
        mixed, z, b, a = delta_parts(self.mixed.double(), self.gates.double(), op)
        beta, decay = b.sigmoid(), -self.a_log.double().exp() * F.softplus(a + self.dt_bias.double())
        past, state = self.past.double(), self.state.double()
        for at, count in enumerate(COUNTS):
            part, own = slice(first, first + count), slice(at, at + 1)
            kept = past[own], state[own]
            read = gated_delta(mixed[part], beta[part], decay[part], self.conv.double(), *kept, op.key_heads)
            scale = torch.rsqrt(read.square().mean(-1, keepdim=True) + op.eps)
            outs.append((read * scale * self.norm.double() * F.silu(z[part])).flatten(1))
            first += count
        return torch.cat(outs), torch.cat((past.flatten(1), state.flatten(1)), 1)


def deltas_are_the_references(library: ctypes.CDLL) -> None:
    for grouped in (False, True):
        case = Deltas(grouped)
        (out, kept), (wanted, states) = case.run(library), case.wanted()
        near(out, wanted, 1e-4)
        near(kept, states, 1e-4)


class Spaces:
    """Makes a case of Mamba-2's recurrence."""

    def __init__(self, heads: int = 4, head_dim: int = 10, groups: int = 2, size: int = 24) -> None:
        torch.manual_seed(size)
        self.heads, self.head_dim, self.groups, self.size = heads, head_dim, groups, size
        self.inner = heads * head_dim
        self.channels = self.inner + 2 * groups * size
        self.mixed = torch.randn(sum(COUNTS), self.inner + self.channels + heads)
        self.conv, self.bias = torch.randn(self.channels, TAPS), torch.randn(self.channels)
        self.fade, self.skip, self.dt_bias = -torch.rand(heads) - 0.1, torch.randn(heads), torch.randn(heads)
        self.norm = torch.rand(self.inner) + 0.5
        self.past = torch.randn(len(COUNTS), self.channels, TAPS - 1)
        self.state = torch.randn(len(COUNTS), heads, head_dim, size)

    def run(
        self, library: ctypes.CDLL, counts: Sequence[int] = COUNTS, rows: slice = ALL, of: slice = ALL
    ) -> tuple[Tensor, Tensor]:
        kept = torch.cat((self.past[of].flatten(1), self.state[of].flatten(1)), 1).contiguous()
        states, taps = s.StatesStruct(kept.data_ptr(), kept.shape[1] * 4), self.conv.T.contiguous()
        mixed = self.mixed[rows].contiguous()
        vectors = (x.data_ptr() for x in (taps, self.bias, self.fade, self.skip, self.dt_bias, self.norm))
        sizes = TAPS, self.heads, self.head_dim, self.groups, self.size
        at = 0, self.past[0].numel() * 4
        struct = s.StateSpaceStruct(ctypes.addressof(states), *vectors, *at, *sizes, 1e-5, self.inner)
        out, items = torch.full((len(mixed), self.inner), torch.nan), stepped(counts)
        call = declare(library, "state_space", P, P, I32, I64, P, P)
        call(ctypes.addressof(struct), items.ctypes.data, len(items), len(mixed), mixed.data_ptr(), out.data_ptr())
        return out, kept

    def wanted(self) -> tuple[Tensor, Tensor]:
        outs, first, past, state = [], 0, self.past.double(), self.state.double()
        gate, mixed, dt = self.mixed.double().split((self.inner, self.channels, self.heads), -1)
        steps = F.softplus(dt + self.dt_bias)
        fixed = self.fade.double(), self.skip.double(), self.conv.double(), self.bias.double()
        for at, count in enumerate(COUNTS):
            part, own = slice(first, first + count), slice(at, at + 1)
            read = state_space(mixed[part], steps[part], *fixed, past[own], state[own], self.groups)
            gated = (read.flatten(1) * F.silu(gate[part])).unflatten(1, (self.groups, -1))
            outs.append(normed(gated.float(), self.norm.view(self.groups, -1), 1e-5).flatten(1))
            first += count
        return torch.cat(outs), torch.cat((past.flatten(1), state.flatten(1)), 1)


def spaces_are_the_references(library: ctypes.CDLL) -> None:
    for groups in (1, 2):
        case = Spaces(groups=groups)
        (out, kept), (wanted, states) = case.run(library), case.wanted()
        near(out, wanted, 1e-4)
        near(kept, states, 1e-4)


def cuts_and_company_change_no_bit(library: ctypes.CDLL) -> None:
    for case in (Deltas(True), Spaces()):
        together, kept = case.run(library)
        last = slice(2, 3)
        first, middle = case.run(library, (33,), slice(6, 39), last)
        cut = case.past[0].numel()
        case.past[2], case.state[2] = middle[0, :cut].view_as(case.past[2]), middle[0, cut:].view_as(case.state[2])
        second, end = case.run(library, (37,), slice(39, 76), last)
        assert torch.equal(together[6:], torch.cat((first, second)))
        assert torch.equal(kept[2:], end)


LATENTS: tuple[Check, ...] = (
    latents_are_the_references,
    a_sequence_is_its_own,
    narrow_expansions_are_read_as_they_are,
)
EXPERTS: tuple[Check, ...] = (routes_are_the_references, gates_are_the_references)
RECURRENT: tuple[Check, ...] = (
    deltas_are_the_references,
    spaces_are_the_references,
    cuts_and_company_change_no_bit,
)
CHECKS = LATENTS + EXPERTS + RECURRENT
