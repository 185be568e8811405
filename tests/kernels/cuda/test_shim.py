"""Tests the SIMT shim: right kernels give right numbers under any schedule, wrong ones are told what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.kernels.abi.native import I32, P
from baton.kernels.cuda import build
from baton.kernels.cuda.shim import Simt, SimtError
from tests.kernels.compilers import needs_compiler

PROBE = Path(__file__).with_name("probe.cu")


@needs_compiler()
def probe(races: bool) -> Simt:
    return Simt(build.on_shim([PROBE], races=races), seed=5, preempt=100)


@pytest.fixture(scope="module")
def plain() -> Simt:
    return probe(False)


@pytest.fixture(scope="module")
def checked() -> Simt:
    return probe(True)


def call(shim: Simt, name: str, *arguments: Any) -> None:
    function = shim[f"baton_{name}"]
    function.argtypes = [P if isinstance(value, np.ndarray) else I32 for value in arguments]
    function(*(value.ctypes.data if isinstance(value, np.ndarray) else value for value in arguments))


def floats(count: int, value: float = np.nan) -> Any:
    return np.full(count, value, np.float32)


@pytest.fixture(params=["plain", "checked"])
def either(request: pytest.FixtureRequest) -> Simt:
    found: Simt = request.getfixturevalue(request.param)
    return found


def test_a_barrier_orders_a_block_under_any_schedule(either: Simt) -> None:
    values = np.arange(288, dtype=np.float32)
    for seed in range(10):
        either.schedule(seed, 200)
        out = floats(288)
        call(either, "reverse", values, out, 1)
        assert (out.reshape(3, 96) == values.reshape(3, 96)[:, ::-1]).all()


def test_a_library_that_nobody_holds_has_no_stacks_left() -> None:
    def reversed_once(shim: Simt) -> None:
        out = floats(288)
        call(shim, "reverse", np.arange(288, dtype=np.float32), out, 1)
        assert out[0] == 95

    def mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    held = probe(False)
    reversed_once(held)
    before = mappings()
    again = Simt(held.path)
    del again
    assert mappings() < before - 96, "two blocks of 96 threads ran"
    reversed_once(held)


def test_a_dropped_barrier_reads_poison_without_checks(plain: Simt) -> None:
    out = floats(288)
    call(plain, "reverse", np.arange(288, dtype=np.float32), out, 0)
    assert np.isnan(out).any()


def test_a_dropped_barrier_is_a_race_in_any_schedule_and_its_line_is_named(checked: Simt) -> None:
    for seed in range(10):
        checked.schedule(seed)
        with pytest.raises(SimtError, match=r"race on byte \d+ of shared memory.*no barrier .*probe\.cu:\d+"):
            call(checked, "reverse", np.arange(288, dtype=np.float32), floats(288), 0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("half", r"deadlock: .*reached by all in block \(0, 0, 0\); 32 of 64 threads \(first: 32\) ended; "
                 r"32 of 64 threads \(first: 0\) waits at __syncthreads, .*probe\.cu:\d+"),
        ("one_lane", r"deadlock: .*1 of 32 threads \(first: 3\) waits at a warp's meeting"),
        ("wild", r"touched memory that isn't there"),
        ("spin", r"no progress"),
        ("too_much", r"more shared memory than a block of sm_90 can have"),
    ],
)  # fmt: skip
def test_what_cannot_go_on_ends_the_launch_in_words(either: Simt, name: str, says: str) -> None:
    argument: Any = 0 if name == "half" else np.zeros(64, np.float32)
    with pytest.raises(SimtError, match=says):
        call(either, name, argument)
    call(either, "reverse", floats(288, 1), floats(288), 1)  # and the next one runs


def test_shared_memory_ends_where_it_was_declared_to(checked: Simt) -> None:
    with pytest.raises(SimtError, match="outside of its block's shared memory"):
        call(checked, "outside", floats(32))


def test_an_asynchronous_copy_is_there_after_its_wait_and_not_before(plain: Simt) -> None:
    values, out = np.arange(128, dtype=np.float32), floats(128)
    call(plain, "copied", values, out, 1)
    assert (out[:124] == values[:124]).all()
    assert (out[124:] == 0).all()  # what isn't filled is zero
    call(plain, "copied", values, out, 0)
    assert np.isnan(out).all()


def test_matrix_fragments_are_those_of_the_ptx_manual(either: Simt) -> None:
    a, b = torch.randn(16, 16).bfloat16(), torch.randn(16, 8).bfloat16()
    out = floats(128)
    call(either, "multiplied", a.view(torch.int16).numpy(), b.view(torch.int16).numpy(), out)
    torch.testing.assert_close(torch.from_numpy(out.reshape(16, 8)), a.float() @ b.float(), atol=1e-5, rtol=1e-5)


def test_atomics_reductions_and_named_barriers_add_up(either: Simt) -> None:
    values, out = np.arange(256, dtype=np.int32), np.zeros(1, np.int32)
    call(either, "summed", values, out)
    assert out[0] == values.sum()


def test_the_same_seed_is_the_same_schedule(plain: Simt) -> None:
    def drawn() -> Any:
        plain.schedule(11)
        out = floats(288)
        call(plain, "reverse", np.arange(288, dtype=np.float32), out, 0)
        return np.isnan(out)

    assert (drawn() == drawn()).all()


RIGHT, UNSWIZZLED, NO_FENCE, NO_WAIT, CHANGED_A, CROOKED, TWO_DESCRIPTORS, WRONG_STRIDE, BY_HALF = range(9)


def grouped(shim: Simt, how: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the warp group's product and the right one."""
    torch.manual_seed(3)
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(128, 16).bfloat16()
    d = floats(64 * 128)
    call(shim, "grouped", *(x.view(torch.int16).numpy() for x in (a, b)), d, how)
    return torch.from_numpy(d).view(64, 128), a.float() @ b.float().T


@pytest.mark.parametrize("how", [RIGHT, UNSWIZZLED])
def test_a_descriptor_leads_to_its_matrix_under_any_schedule(either: Simt, how: int) -> None:
    for permille in (0, 100, 500):
        either.schedule(7, permille)
        found, wanted = grouped(either, how)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_wrong_stride_or_swizzle_gives_a_wrong_product(plain: Simt) -> None:
    for how in (WRONG_STRIDE, BY_HALF):
        found, wanted = grouped(plain, how)
        assert not torch.allclose(found, wanted, atol=0.1)


def test_sums_are_no_numbers_until_the_product_is_waited_for(plain: Simt) -> None:
    assert bool(grouped(plain, NO_WAIT)[0].isnan().all())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (NO_FENCE, "no wgmma_fence is in front of it"),
        (CHANGED_A, "a register of a was written before wgmma_wait"),
        (CROOKED, "begins at a multiple of 1024"),
        (TWO_DESCRIPTORS, "the warps of a group have different descriptors"),
    ],
)
def test_what_the_manual_forbids_of_a_product_is_said(plain: Simt, how: int, said: str) -> None:
    with pytest.raises(SimtError, match=said):
        grouped(plain, how)


ACROSS, NO_PROXY_FENCE, NO_LEADING, LATER_ONE = range(4)


def across(shim: Simt, how: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the warp group's product with columns innermost, brought by cp.async, and the right one."""
    torch.manual_seed(4)
    a, b = torch.randn(64, 16).bfloat16(), torch.randn(16, 128).bfloat16()
    d = floats(64 * 128)
    call(shim, "across", *(x.view(torch.int16).numpy() for x in (a, b)), d, how)
    return torch.from_numpy(d).view(64, 128), a.float() @ b.float()


def test_columns_that_cp_async_brought_are_multiplied_under_any_schedule(either: Simt) -> None:
    for permille in (0, 100, 500):
        either.schedule(8, permille)
        found, wanted = across(either, ACROSS)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_columns_without_their_leading_bytes_are_others(plain: Simt) -> None:
    found, wanted = across(plain, NO_LEADING)
    torch.testing.assert_close(found[:, :64], wanted[:, :64], atol=1e-5, rtol=1e-5)
    assert not torch.allclose(found[:, 64:], wanted[:, 64:], atol=0.1)


def test_of_two_products_the_older_one_is_waited_for(plain: Simt) -> None:
    found, wanted = across(plain, LATER_ONE)
    torch.testing.assert_close(found[:32], wanted[:32], atol=1e-5, rtol=1e-5)
    assert bool(found[32:].isnan().all())


def test_a_product_of_what_threads_copied_needs_a_fence_between_the_proxies(plain: Simt) -> None:
    with pytest.raises(SimtError, match="no async_proxy_fence is between"):
        across(plain, NO_PROXY_FENCE)


def test_a_bulk_copy_is_there_when_its_barrier_says_so_and_not_before(either: Simt) -> None:
    values, out = np.arange(128, dtype=np.float32), floats(128)
    call(either, "bulk_copied", values, out, 0)
    assert (out == values).all()


def test_who_does_not_wait_for_a_bulk_copy_reads_poison_and_is_found(plain: Simt, checked: Simt) -> None:
    values, out = np.arange(128, dtype=np.float32), floats(128)
    call(plain, "bulk_copied", values, out, 1)
    assert np.isnan(out).any()
    with pytest.raises(SimtError, match="race on byte"):
        call(checked, "bulk_copied", values, out, 1)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (2, "more arrive than the 1 that it expects"),
        (3, "used before mbarrier_init"),
        (4, "are not multiples of 16"),
        (5, "deadlock: .*an mbarrier"),
    ],
)
def test_what_a_barrier_in_memory_is_misused_for_is_said(plain: Simt, how: int, said: str) -> None:
    with pytest.raises(SimtError, match=said):
        call(plain, "bulk_copied", np.arange(128, dtype=np.float32), floats(128), how)
