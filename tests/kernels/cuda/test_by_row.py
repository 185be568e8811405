"""bf16 weights row by row on the SIMT shim: our kernel of few rows, and cuBLASLt for many, by a stand-in of it."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from baton.engine.backends.cuda.products import library_path
from baton.kernels.abi import native
from baton.kernels.abi.build import cache_dir
from baton.kernels.abi.compiler import cache_key, made
from baton.kernels.abi.native import I32, I64, P
from baton.kernels.cuda import build, on_gpu, shim
from baton.kernels.linear import cpu
from baton.kernels.linear.by_row import BY_ROW, rows_of
from baton.kernels.linear.packed import PackedMatrixStruct, PackedWeight, pack_bf16
from tests.kernels import linear_suite as suite
from tests.kernels.cuda import test_linear as few
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

STAND_IN = Path(__file__).with_name("stand_in_cublaslt.c")
SHAPES = ((1, 1), (100, 72), (97, 385), (31, 1040), (200, 769))
ROWS = (1, 9, 17, 33, 65)  # every tile of our kernel, and two of its blocks
MANY = 70


@cache
def stand_in() -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler for cuBLASLt's stand-in")
    path = cache_dir() / "stand-ins" / f"cublaslt-{cache_key(STAND_IN.read_bytes())}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    return made(path, [compiler, "-shared", "-fPIC", "-O1", str(STAND_IN)])


def library_at() -> str:
    """cuBLASLt itself on a card."""
    return library_path() if on_gpu.asked() else str(stand_in())


def products() -> int:
    """How many products the stand-in has computed in this process; -1 on a card."""
    if on_gpu.asked():
        return -1
    count = ctypes.CDLL(str(stand_in())).stand_in_products
    count.restype = ctypes.c_int64
    return int(count())


@cache
def library(*flags: str, races: bool = False) -> ctypes.CDLL:
    checked = few.library(*flags, races=races)
    path, version = library_at().encode(), I64()
    native.declare(checked, "linear_library", P, P)(path, ctypes.addressof(version))
    assert version.value == 130000 or on_gpu.asked()
    return checked


def choose(checked: ctypes.CDLL, n: int, k: int, gated: bool, ways: dict[int, int]) -> None:
    sizes, taken = (ctypes.c_int64 * len(ways))(*ways), (ctypes.c_int32 * len(ways))(*ways.values())
    call = native.declare(checked, "linear_ways", I64, I64, I32, P, P, I64)
    call(n, k, int(gated), ctypes.addressof(sizes), ctypes.addressof(taken), len(ways))


class ByRow:
    """A weight row by row, called as the panels of it are."""

    def __init__(self, weight: PackedWeight) -> None:
        self.plain, self.n, self.k = weight, weight.n, weight.k
        self.data = rows_of(weight)
        scale = None if weight.row_scale is None else weight.row_scale.data_ptr()
        self.struct = PackedMatrixStruct(
            weight.kind, BY_ROW, weight.n, weight.k, self.data.data_ptr(), None, None, scale
        )
        self.address = ctypes.addressof(self.struct)

    def run(
        self,
        checked: ctypes.CDLL,
        x: Tensor,
        bias: Tensor | None = None,
        name: str = "linear",
        width: int = 0,
        gap: int = 0,
    ) -> Tensor:
        """``gap``: floats between a result's rows, and in front of them, which must stay NaN."""
        width = width or self.n
        memory = torch.full((len(x) + 1, width + gap), torch.nan, dtype=x.dtype)
        out, code = memory.flatten()[gap:], cpu.CODES[x.dtype]
        at_bias = None if bias is None else bias.data_ptr()
        few.function(checked, name)(
            *(self.address, x.data_ptr(), code, x.stride(0), len(x)),
            *(at_bias, out.data_ptr(), code, width + gap),
        )
        found = out[: len(x) * (width + gap)].view(len(x), -1)[:, :width]
        assert int(memory.isnan().sum()) == memory.numel() - found.numel()
        return found.clone()


def weight(n: int, k: int, scaled: bool = False) -> ByRow:
    plain = torch.randn(n, k)
    return ByRow(pack_bf16(plain, torch.rand(n) + 0.5 if scaled else None))


def right(found: Tensor, x: Tensor, of: ByRow, bias: Tensor | None = None, most: float = 2e-6) -> bool:
    return suite.off(found, suite.exact(x, of.plain, bias)) < most


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_few_rows_are_the_float64_oracles_and_keep_their_bits_in_company(n: int, k: int) -> None:
    torch.manual_seed(n + k)
    checked, of, bias = few.library(), weight(n, k), torch.randn(n)
    x = (torch.randn(ROWS[-1], k + 5) * 3)[:, 3 : 3 + k]
    whole = of.run(checked, x, bias, gap=3)
    assert right(whole, x, of, bias)
    for m in ROWS[:-1]:
        assert torch.equal(of.run(checked, x[:m], bias, gap=3), whole[:m])
    half = x.bfloat16()
    assert right(of.run(checked, half[:9], bias), half[:9], of, bias, 4e-3)


@pytest.mark.parametrize("m", [3, 40])
def test_a_gate_in_the_epilogue_gives_the_bits_of_two_ops(m: int) -> None:
    torch.manual_seed(51)
    checked, inner, x = few.library(), 48, torch.randn(m, 200)
    of, bias = weight(2 * inner, 200, scaled=True), torch.randn(2 * inner)
    both, wanted = of.run(checked, x, bias), torch.empty(m, inner)
    native.declare(checked, "swiglu", P, I64, I64, P)(both.data_ptr(), m, inner, wanted.data_ptr())
    assert torch.equal(of.run(checked, x, bias, "linear_swiglu", inner), wanted)


@pytest.mark.parametrize("m", [5, 33])
def test_no_schedule_changes_a_bit_and_none_races(m: int) -> None:
    torch.manual_seed(52)
    of, x = weight(40, 520), torch.randn(m, 520)
    wanted = of.run(few.library(), x)
    for seed in few.SEEDS:
        for other in (
            few.library(seed=seed, preempt=100),
            few.library("-DBATON_MUTATION_CUDA_LINEAR_ROWS", seed=seed, preempt=10, races=True),
        ):
            assert torch.equal(of.run(other, x), wanted)


def launched(checked: ctypes.CDLL, call: Callable[[], object]) -> set[str]:
    checked.rehearsal.note()  # type: ignore[attr-defined]
    call()
    return {each.removeprefix("linear ") for each in checked.rehearsal.launched()}  # type: ignore[attr-defined]


def test_more_than_64_rows_go_by_the_library_where_a_trial_said_so() -> None:
    torch.manual_seed(53)
    checked, of, x = library(), weight(96, 200), torch.randn(200, 200).bfloat16().float()
    choose(checked, 96, 200, False, {65: 1, 100: 0, 150: 1})
    for m, by_library in ((64, 0), (65, 1), (66, 0), (100, 0), (120, 1), (200, 1)):
        before = products()
        kernels = launched(checked, lambda m=m: right(of.run(checked, x[:m]), x[:m], of) or pytest.fail("wrong"))  # type: ignore[misc]
        assert products() - before == by_library or on_gpu.asked(), m
        assert any(each.startswith("by_row") for each in kernels) == (not by_library)
    choose(checked, 96, 200, False, {})
    assert any(each.startswith("by_row") for each in launched(checked, lambda: of.run(checked, x)))


def test_what_the_library_leaves_is_done_behind_it() -> None:
    """A bias in float32 is the library's; a gate, scales of rows and a bias in bf16 aren't, nor odd addresses."""
    torch.manual_seed(54)
    checked, inner = library(), 48
    choose(checked, 2 * inner, 200, False, {65: 1})
    choose(checked, 2 * inner, 200, True, {65: 1})
    bias, x = torch.randn(2 * inner), torch.randn(MANY, 200)
    for scaled in (False, True):
        of = weight(2 * inner, 200, scaled)
        for rows in (x, x.bfloat16()):
            loose = 5e-3 if scaled or rows.dtype == torch.bfloat16 else 2e-6
            before = products()
            kernels = launched(checked, lambda of=of, rows=rows: of.run(checked, rows, bias))  # type: ignore[misc]
            assert right(of.run(checked, rows, bias), rows, of, bias, loose)
            assert right(of.run(checked, rows), rows, of, None, loose)
            assert ("finish_rows" in kernels) == (scaled or rows.dtype == torch.bfloat16)
            gate, up = suite.exact(rows, of.plain, bias).chunk(2, 1)
            wanted = torch.nn.functional.silu(gate) * up
            assert suite.off(of.run(checked, rows, bias, "linear_swiglu", inner), wanted) < 1e-2
            assert products() - before == 4 or on_gpu.asked()
    assert right(of.run(checked, x, bias, gap=3), x, of, bias, 5e-3)
    narrow = weight(30, 44)
    choose(checked, 30, 44, False, {65: 1})
    x = torch.randn(MANY, 44)
    assert right(narrow.run(checked, x), x, narrow, None, 5e-3)  # rows of 30 floats are no multiple of 16 bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_long_chunk_goes_by_the_library_in_pieces(dtype: torch.dtype) -> None:
    torch.manual_seed(58)
    checked, of, x = library(), weight(32, 24), torch.randn(2050, 24).to(dtype)
    choose(checked, 32, 24, True, {65: 1})
    gate, up = suite.exact(x, of.plain).chunk(2, 1)
    before = products()
    found = of.run(checked, x, None, "linear_swiglu", 16)
    assert suite.off(found, torch.nn.functional.silu(gate) * up) < 1e-2
    assert products() - before == 2 or on_gpu.asked()


@pytest.mark.skipif(on_gpu.asked(), reason="the stand-in alone refuses a size")
def test_more_than_64_rows_of_a_size_that_the_library_has_no_way_for_are_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(55)
    checked, of, x = library(), weight(64, 104), torch.randn(81, 104)
    monkeypatch.setenv("STAND_IN_NO_WAY", "81")
    choose(checked, 64, 104, False, {65: 1})
    before = products()
    assert "by_row<8>" in launched(checked, lambda: right(of.run(checked, x), x, of) or pytest.fail("wrong"))
    assert products() == before


@pytest.mark.skipif(on_gpu.asked(), reason="refused before a card is asked")
def test_what_the_library_path_leads_to_must_be_cublaslt(tmp_path: Path) -> None:
    fresh = shutil.copy(build.simt(few.OPS), tmp_path / "fresh.so")  # one library a process is opened once
    call = native.declare(shim.as_library(Path(fresh)), "linear_library", P, P)
    version = I64()
    for path in (tmp_path / "none.so", Path(fresh)):
        with pytest.raises(shim.SimtError, match="status 302"):
            call(str(path).encode(), ctypes.addressof(version))


def test_what_knows_panels_alone_refuses_rows() -> None:
    of, x = weight(64, 64), torch.randn(2, 64)
    of.struct.kind = 1
    with pytest.raises(shim.SimtError, match="status 1"):
        of.run(few.library(), x)


def few_rows(checked: ctypes.CDLL) -> None:
    torch.manual_seed(56)
    of, bias = weight(70, 712), torch.randn(70)
    for m in (5, 40):
        x = torch.randn(m, 712)
        assert right(of.run(checked, x, bias), x, of, bias)


def gated_by_library(checked: ctypes.CDLL) -> None:
    torch.manual_seed(57)
    of, x = weight(64, 96), torch.randn(MANY, 96)
    choose(checked, 64, 96, True, {65: 1})
    gate, up = suite.exact(x, of.plain).chunk(2, 1)
    wanted = torch.nn.functional.silu(gate) * up
    assert suite.off(of.run(checked, x, None, "linear_swiglu", 32), wanted) < 1e-2


BUGS: dict[str, Sequence[Callable[[ctypes.CDLL], None]]] = {
    "WAIT": [few_rows],
    "PITCH": [few_rows],
    "HALF": [few_rows],
    "GATE": [gated_by_library],
    "RING": [few_rows],
}


def planted(bug: str) -> ctypes.CDLL:
    flags = (f"-DBATON_MUTATION_CUDA_LINEAR_ROW_{bug}", "-DBATON_MUTATION_CUDA_LINEAR_ROWS")
    return library(*flags, races=bug == "RING")


@pytest.mark.parametrize("bug", ["NONE", "RING"])
def test_without_a_bug_the_same_checks_hold(bug: str) -> None:
    flags = ("-DBATON_MUTATION_CUDA_LINEAR_ROWS",)
    checked = library(*flags, races=bug == "RING")
    for check in (few_rows, gated_by_library):
        check(checked)


@pytest.mark.parametrize("bug", first_now([*BUGS]))
def test_a_planted_bug_is_caught(bug: str) -> None:
    assert is_caught(planted(bug), BUGS[bug])
