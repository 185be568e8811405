"""Checks what holds of AMX's tiles beside what the ops' own suites say; each check takes a library with tiles.

Knows nothing of pytest. Where tiles are emulated, what hardware would fault on is counted, and which threads keep
theirs.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable

import torch

from baton.kernels.abi import build, native
from baton.kernels.paged_attention.native import attend
from tests.kernels import attention_suite, linear_suite, moe_suite

ON = "amx" if "amx" in native.able() else build.EMULATED  # what the suite runs on
Check = Callable[[ctypes.CDLL], None]

# outputs, inputs, rows: one tile and two, an odd one, steps with a tail, several chunks
SHAPES = ((70, 40, 1), (64, 256, 9), (130, 1096, 33), (65, 2200, 50))


def products(library: ctypes.CDLL) -> int:
    """Counts the emulated tiles' products so far; of real tiles nothing counts them."""
    if not hasattr(library, "baton_amx_products"):
        return 0
    return native.declare(library, "amx_products", result=native.I64)() or 0


def tiles_are_given_back(library: ctypes.CDLL) -> None:
    """Asserts that no thread has tiles between calls, and that none did what hardware faults on."""
    assert native.declare(library, "amx_users", result=native.I32)() == 0, "tiles are still configured"
    if hasattr(library, "baton_amx_faults"):
        assert native.declare(library, "amx_faults", result=native.I64)() == 0, (
            "tiles were used as hardware refuses"
        )


def layers_are_the_oracles(library: ctypes.CDLL) -> None:
    """Every form of weights, by tiles where they multiply it; all threads give their tiles back."""
    linear_suite.set_threads(library, 3)
    for n, k, m in SHAPES:
        for form in linear_suite.forms_of(library):
            linear_suite.is_the_exact_oracles(library, form, n, k, m, torch.float32)
    tiles_are_given_back(library)


def rows_are_their_own(library: ctypes.CDLL) -> None:
    """A row's bits don't depend on its company, in few tiles' rows and in many."""
    linear_suite.rows_do_not_depend_on_company(library, 93)
    tiles_are_given_back(library)


def prompts_are_the_oracles(library: ctypes.CDLL) -> None:
    """Compares attention by tiles with the oracle: bf16 and int8 pages, chunks and decodes, a window, other
    sequences beside.
    """
    for dtype in ("bfloat16", "int8"):
        attention_suite.attention_is_the_oracles(library, dtype, (6, 2, 24))
        attention_suite.attention_is_the_oracles(library, dtype, (5, 1, 80), 37)
        attention_suite.company_changes_no_bit(library, dtype)
        attention_suite.company_changes_no_bit(library, dtype, 130)
    tiles_are_given_back(library)


def few_rows_have_the_bits_of_tiles(library: ctypes.CDLL) -> None:
    """Rows that are too few for tiles get the bits that they have within a chunk; of subnormal numbers, too, which
    tiles take for zeros.
    """
    for shape in ((6, 2, 24), (4, 4, 64), (8, 2, 80)):
        case = attention_suite.Case(5, "bfloat16", shape, [(0, 300)])
        case.write(library)
        pages, stored = case.items[0][0], case.kv.memory.view(torch.bfloat16).float()
        for by in (1.0, 2.0**-124):
            kv = dataclasses.replace(case.kv, memory=(stored * by).bfloat16().view(torch.uint8))
            whole = attend(library, case.q / by, kv, case.items)
            assert bool(whole.isfinite().all())
            for at in (0, 1, 31, 32, 255, 256, 299):
                alone = attend(library, case.q[at : at + 1] / by, kv, [(pages, at, 1)])
                assert torch.equal(alone[0], whole[at]), (shape, by, at)


def experts_are_the_oracles(library: ctypes.CDLL) -> None:
    """bf16 experts, whose sizes are whole tiles or not; a row's bits are its own."""
    for shape in (*moe_suite.SHAPES[1:4], (90, 72, 40, 3, 2)):
        moe_suite.it_is_the_oracles(library, shape)
    moe_suite.company_changes_no_bit(library)
    moe_suite.biased_experts_are_the_oracles(library)
    tiles_are_given_back(library)


EXPERTS: tuple[Check, ...] = (experts_are_the_oracles,)
LINEAR: tuple[Check, ...] = (layers_are_the_oracles, rows_are_their_own, linear_suite.bad_rows_stay_alone)
ATTENTION: tuple[Check, ...] = (few_rows_have_the_bits_of_tiles, prompts_are_the_oracles)
