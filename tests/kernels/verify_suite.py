"""Checks that a speculative verify of K rows of a sequence equals K decode steps, to the bit and the token.

Through rope_append, paged_attention, lm_head and speculative_accept of one library. Knows nothing of pytest.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from baton.engine.plan import SampleSpec
from baton.kernels.linear.packed import PackedWeight, pack_bf16
from baton.kernels.paged_attention.native import attend
from tests.kernels import accept_suite, attention_suite
from tests.kernels.head_suite import ask, drawn

SHAPE = (6, 2, 32)
STARTS = (0, 13, 251, 256)  # the new rows cross a page, a split, or begin one
LONGEST = 8
VOCAB = 70


class Run(NamedTuple):
    """LONGEST decode steps of every sequence: rows out of attention, and tokens, both (sequences, LONGEST, …)."""

    case: attention_suite.Case
    weight: PackedWeight
    rows: Tensor
    tokens: Tensor


def spec(sequence: int, place: int) -> SampleSpec:
    """Returns how a place chooses its token: greedily, drawn, or drawn from a nucleus, by its own random number."""
    fields = ({}, {"temperature": 1.0}, {"temperature": 0.8, "top_p": 0.9})[sequence % 3]
    return ask(seed=100 * sequence + place, **fields)


def decoded(library: ctypes.CDLL, dtype: str) -> Run:
    """One row of each sequence at a time."""
    case = attention_suite.Case(13, dtype, SHAPE, [(start, LONGEST) for start in STARTS])
    case.write(library)
    weight, q = pack_bf16(torch.randn(VOCAB, SHAPE[0] * SHAPE[2])), case.q.view(len(STARTS), LONGEST, *SHAPE[::2])
    rows, tokens = torch.empty(len(STARTS), LONGEST, weight.k), []
    for place in range(LONGEST):
        items = [(pages, start + place, 1) for pages, start, _ in case.items]
        rows[:, place] = attend(library, q[:, place].contiguous(), case.kv, items).flatten(1)
        specs = [spec(sequence, place) for sequence in range(len(STARTS))]
        tokens.append(drawn(library, weight, rows[:, place].contiguous(), specs))
    return Run(case, weight, rows, torch.tensor(tokens).T)


def a_verified_run_is_the_decoded_one(library: ctypes.CDLL, dtype: str) -> None:
    """Verifies runs of 2 to 8 rows; then with a draft that is wrong at any place, at which the decoded token comes
    instead.
    """
    run = decoded(library, dtype)
    for most in range(2, LONGEST + 1):
        lengths = [most, *(2 + (most + sequence) % 7 for sequence in range(1, len(STARTS)))]
        found, tokens = verified(library, run, lengths)
        sequences = []
        for sequence, length in enumerate(lengths):
            assert torch.equal(found[sequence], run.rows[sequence, :length]), (STARTS[sequence], length)
            assert tokens[sequence].tolist() == run.tokens[sequence, :length].tolist()
            drafts = run.tokens[sequence, : length - 1].clone()
            if sequence:  # the first one's drafts are all right
                drafts[(most + sequence) % (length - 1)] += 1
            sequences.append((drafts, tokens[sequence]))
        for sequence, (emitted, stand) in enumerate(accept_suite.accepted(library, sequences)):
            wrong = (most + sequence) % (lengths[sequence] - 1) if sequence else lengths[sequence] - 1
            assert stand == wrong
            assert emitted[: stand + 1].tolist() == run.tokens[sequence, : stand + 1].tolist()


def verified(library: ctypes.CDLL, run: Run, lengths: list[int]) -> tuple[list[Tensor], list[Tensor]]:
    """Rows and tokens of the sequences' first ``lengths`` places, in one call of each op."""
    q = run.case.q.view(len(STARTS), LONGEST, *SHAPE[::2])
    items = [(pages, start, length) for (pages, start, _), length in zip(run.case.items, lengths, strict=True)]
    together = torch.cat([q[sequence, :length] for sequence, length in enumerate(lengths)])
    rows = attend(library, together, run.case.kv, items).flatten(1)
    specs = [spec(sequence, place) for sequence, length in enumerate(lengths) for place in range(length)]
    tokens = torch.tensor(drawn(library, run.weight, rows, specs))
    return list(rows.split(lengths)), list(tokens.split(lengths))
