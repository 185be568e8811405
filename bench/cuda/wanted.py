"""Computes in plain torch what ops must give for the same inputs; of large ones the first and last rows.

Knows no time.

Packed weights are multiplied on the CPU, from what the kernels' panels unpack to; attention reads pages as the spec
of their formats does (``kernels/paged_attention/stored.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.reference import linear
from baton.kernels.paged_attention.stored import attend_stored, read_layer
from baton.kernels.speculative_accept.cpu import DRAFT
from baton.kernels.speculative_accept.reference import Rejection, speculative_accept
from baton.kernels.step.structs import CHOICE
from bench.cuda import clock
from bench.cuda.clock import Call
from bench.cuda.ops import KvPool
from bench.cuda.right import off, poison


def ends(count: int, most: int = 8) -> list[int]:
    """Returns the first and last row numbers, ``most`` of them at most."""
    return sorted({*range(min(count, most // 2)), *range(max(0, count - most // 2), count)})


def product_error(call: Call, weight: PackedWeight, x: Tensor, out: Tensor, gated: bool = False) -> float:
    """Returns how far off ``call`` computes out = x · weightᵀ, by a few rows; ``gated``: silu(first half) x the
    second.
    """
    return rows_error(call, product_rows(weight, x, gated), out)


def product_rows(weight: PackedWeight, x: Tensor, gated: bool = False) -> Tensor:
    """Returns what the first and last rows of such a product have to be."""
    found = linear(x[ends(len(x))].float().cpu(), weight)
    if gated:
        gate, up = found.chunk(2, -1)
        found = torch.nn.functional.silu(gate) * up
    return found


def rows_error(call: Call, wanted: Tensor, out: Tensor) -> float:
    """Returns how far off ``call`` leaves the first and last rows of ``out``; infinity where a row isn't finite."""
    poison(out)
    call()
    clock.wait()
    return off(out[ends(len(out))].float().cpu(), wanted) if bool(torch.isfinite(out).all()) else float("inf")


def attention_error(
    call: Call, pool: KvPool, tables: Tensor, starts: Sequence[int], q: Tensor, out: Tensor
) -> float:
    """Returns how far off attention is: sequences of as many rows of ``q`` each, behind ``starts`` tokens; of a
    long chunk the first and last rows.
    """
    poison(out)
    call()
    clock.wait()
    if not bool(torch.isfinite(out).all()):
        return float("inf")
    queries = len(q) // len(starts)
    pairs = [_attended(pool, tables, starts, q, out, sequence, queries, at) for sequence in ends(len(starts), 2)
             for at in {0, max(0, queries - 8)}]  # fmt: skip
    return max(off(found, wanted) for found, wanted in pairs)


def _attended(
    pool: KvPool,
    tables: Tensor,
    starts: Sequence[int],
    q: Tensor,
    out: Tensor,
    sequence: int,
    queries: int,
    at: int,
) -> tuple[Tensor, Tensor]:
    """Rows ``at`` … of one sequence: as found, and as wanted."""
    first, count = sequence * queries + at, min(8, queries - at)
    memory = pool.memory[tables[sequence].long()].cpu()
    pages, rows = torch.arange(len(memory)), slice(first, first + count)
    kv = read_layer(memory, pages, 0, 1, pool.kv_heads, pool.head_dim, pool.dtype)
    wanted = attend_stored(q[rows].float().cpu(), kv, (starts[sequence] + at, count), 0, pool.head_dim**-0.5)
    return out[rows].float().cpu().view_as(wanted), wanted


def choice_error(call: Call, weight: PackedWeight, x: Tensor, choices: Tensor, temperature: float) -> float:
    """Returns by how much the worst of a few chosen tokens misses: the likeliest one's logit, as a share of the
    logits' spread, or the drawn one's place, as a share of all probability.
    """
    call()
    clock.wait()
    made, rows = choices.cpu().numpy().view(CHOICE), ends(len(x))
    logits = linear(x[rows].float().cpu(), weight).double()
    return max(_missed(one, made[row], temperature) for one, row in zip(logits, rows, strict=True))


def _missed(logits: Tensor, choice: np.void, temperature: float) -> float:
    token = int(choice["token"])
    if not 0 <= token < len(logits):
        return float("inf")
    if not temperature:
        return float((logits.max() - logits[token]) / logits.std())
    reached = torch.softmax(logits / temperature, -1).cumsum(0)
    low, high = (float(reached[token - 1]) if token else 0.0), float(reached[token])
    return max(0.0, low - float(choice["uniform"]), float(choice["uniform"]) - high)


def accept_error(call: Call, drafts: Tensor, rows: dict[str, Tensor], temperature: float = 1.0) -> float:
    """Returns the share of a few sequences whose accepted drafts are not the reference's."""
    call()
    clock.wait()
    made = drafts.cpu().numpy().view(DRAFT)
    at, plain = ends(len(made)), {name: tensor.cpu() for name, tensor in rows.items()}
    return sum(not _accepted(made[row], plain, row, temperature) for row in at) / len(at)


def _accepted(draft: np.void, rows: dict[str, Tensor], row: int, temperature: float) -> bool:
    by: Tensor | Rejection
    if "chosen" in rows:
        by = rows["chosen"][row]
    else:
        by = Rejection(
            rows["target"][row], rows["proposed"][row], rows["accept"][row], rows["draw"][row], temperature
        )
    count, token = speculative_accept(rows["tokens"][row], by)
    return int(draft["accepted"]) == count and int(rows["emitted"][row][count]) == token


def exact(found: Callable[[], Tensor], wanted: Callable[[], Tensor]) -> float:
    """Returns the share of elements that differ."""
    mine, theirs = found().cpu(), wanted().cpu()
    return float((mine != theirs).double().mean())
