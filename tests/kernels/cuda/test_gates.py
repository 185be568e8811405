"""The gates on the CUDA kernels' machine code: what they let through, and what they stop. No nvcc needed here.

``make cuda-check`` runs them on the real thing.
"""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from baton.kernels.abi.build import BuildError
from baton.kernels.cuda import build, check, ledger, table
from baton.kernels.cuda.machine_code import disassembly, in_flight, occupancy
from baton.kernels.cuda.names import short
from tests.thorough import first_now

KERNEL = "_ZN5baton39_GLOBAL__N__52f0b7aa_7_cuda_cu_80e38b756appendILi3ELi8EEEvNS0_4CallE"
PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z4onlyPf' for 'sm_90a'
ptxas info    : Function properties for _Z4onlyPf
    88 bytes stack frame, 164 bytes spill stores, 128 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 88 bytes cumulative stack size, 1152 bytes smem
ptxas info    : Function properties for _Z6helperv
    16 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Compiling entry function '_Z5otherIfEvPT_' for 'sm_90a'
ptxas info    : Function properties for _Z5otherIfEvPT_
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
"""


def _asked() -> dict[str, list[tuple[str, int]]]:
    """Returns the bytes of shared memory that are recorded, by op and by the name in its source."""
    record = json.loads(occupancy.RECORD.read_text())
    asked = {
        op: [(need["bytes"], need["shared"]) for need in kernels.values() if "bytes" in need]
        for op, kernels in record.items()
    }
    return {op: needs for op, needs in sorted(asked.items()) if needs}


ASKED = _asked()


def book(**changes: int) -> dict[str, Any]:
    cost = {"registers": 40, "shared": 1024, "spills": 0} | changes
    return {"nvcc": "13.0", "kernels": {"op": {"k<1>": cost}}}


def test_names_lose_what_the_compiler_adds() -> None:
    assert short(KERNEL) == "append<3, 8>"
    assert short("_Z5otherIfEvPT_") == "other<float>"
    assert short("_Z4onlyPf") == "only"


def test_what_ptxas_says_is_read_kernel_by_kernel() -> None:
    assert ledger.costs(PTXAS) == {
        "only": {"registers": 64, "shared": 1152, "spills": 292},
        "other<float>": {"registers": 30, "shared": 0, "spills": 0},
    }


@pytest.mark.parametrize(("cost", "value"), [("registers", 41), ("shared", 1040), ("spills", 4)])
def test_growth_is_said_and_shrinking_is_not(cost: str, value: int) -> None:
    grown = book(**{cost: value})
    assert ledger.differences(book(), grown) == [
        f"op: k<1> takes {value} {cost}, the ledger allows {book()['kernels']['op']['k<1>'][cost]}"
    ]
    assert ledger.differences(grown, book()) == []


def test_kernels_that_come_or_go_are_said() -> None:
    other = copy.deepcopy(book())
    other["kernels"]["op"]["k<2>"] = other["kernels"]["op"].pop("k<1>")
    said = ledger.differences(book(), other)
    assert said == ["op: k<2> is not in the ledger", "op: k<1> is in the ledger and no longer in the source"]


def test_products_that_wait_for_each_other_are_said() -> None:
    line = (
        "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to x"
    )
    assert ledger.serialized(PTXAS) == []
    assert ledger.serialized(f"{PTXAS}\n{line}\n") == [" ".join(line.split())]


def test_another_compilers_registers_are_not_compared_but_its_spills_are() -> None:
    other = book(registers=99, spills=8) | {"nvcc": "13.2"}
    assert ledger.differences(book(), other) == ["op: k<1> takes 8 spills, the ledger allows 0"]


def test_instructions_that_are_missing_or_unwanted_are_said() -> None:
    kernels = {"k<1>": Counter({"LDG.E.128": 4, "LDL": 1})}
    assert disassembly.missing({"k<*>": [r"LDG\.E\.128.*"]}, kernels) == []
    assert disassembly.missing({"k<*>": ["HMMA.*"]}, kernels) == ["k<1> has no instruction like HMMA.*"]
    assert disassembly.missing({"k<*>": ["!LDL.*"]}, kernels) == ["k<1> has an instruction like LDL.*"]
    assert disassembly.missing({"gone": []}, kernels) == ["no kernel is named gone"]


def test_blocks_that_do_not_fit_are_said_by_what_they_take() -> None:
    """Attention's 168 registers of 128 threads let three blocks in, not four."""
    cost = {"registers": 168, "shared": 8320, "spills": 0}
    assert occupancy.fitting(cost, 128, 44_496) == 3
    assert occupancy.fitting(cost | {"registers": 169}, 128, 44_496) == 2  # given in eights
    assert occupancy.fitting(cost, 128, 100_000) == 2
    assert occupancy.fitting({"registers": 16, "shared": 0, "spills": 0}, 1024, 0) == 2
    wanted: dict[str, occupancy.Wanted] = {
        "attend<*>": {"blocks": 4, "shared": 0},
        "gone": {"blocks": 1, "shared": 0},
    }
    assert occupancy.lacking(wanted, {"attend<1>": cost}, {"attend<1>": 128}) == [
        "no kernel is named gone", "3 blocks of attend<1> fit on a multiprocessor, and 4 are counted on",
    ]  # fmt: skip


LOADS = """
		Function : _Z4onlyPf
        /*0a90*/              @!P2 LDG.E.128.CONSTANT R204, desc[UR12][R12.64] ;         /* 0x0000000c0ccc2981 */
        /*0ac0*/               @P3 LDG.E.128 R4, desc[UR12][R14.64+0x400] ;              /* 0x0004000c0e041981 */
        /*0ad0*/                   IADD3 R9, R8, 0x4, RZ ;                               /* 0x0000000408097810 */
        /*0ae0*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;                       /* 0x000080000000791f */
        /*0af0*/                   LOP3.LUT R158, R206, UR15, RZ, 0x3c, !PT ;            /* 0x0000000f069e7c12 */
        /*0b00*/                   LDG.E.64 R16, desc[UR12][R4.64] ;                     /* 0x0000000c04107981 */
        /*0b10*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;                       /* 0x000080000000791f */
"""


def test_loads_are_under_way_until_one_of_their_registers_is_named() -> None:
    code = disassembly.parsed(LOADS)
    assert [each.mnemonic for each in code["only"]][:3] == ["LDG.E.128.CONSTANT", "LDG.E.128", "IADD3"]
    assert list(in_flight.under_way(code["only"], r"LDG\.E.*")) == [1, 2, 1]  # the third's address is the second's
    assert list(in_flight.under_way(code["only"], r"LDG\.E.*", r"WARPGROUP.*")) == [2, 1]
    need: dict[str, in_flight.WantedLoads] = {
        "o*": {"loads": r"LDG\.E.*", "least": 2},
        "gone": {"loads": "", "least": 1},
    }
    assert in_flight.lacking(need, code) == ["no kernel is named gone"]
    need = {"only": {"loads": r"LDG\.E.*", "least": 2, "before": r"WARPGROUP.*"}}
    assert in_flight.lacking(need, code) == ["only has 1 loads under way together, and 2 are meant"]


@pytest.mark.parametrize("op", first_now(list(ASKED)))
def test_shared_memory_that_is_counted_on_is_what_the_sources_ask_for(op: str, tmp_path: Path) -> None:
    compiler = shutil.which("g++") or pytest.skip("no C++ compiler here")
    probe = tmp_path / f"{op}.cpp"
    lines = [f'static_assert({of} == {count}, "{of}");' for of, count in ASKED[op]]
    probe.write_text("\n".join((f'#include "{build.source(op)}"', "using namespace baton;", *lines)))
    flags = [flag for flag in build.SIMT_FLAGS if not flag.startswith("-g")]
    command = [compiler, *flags, "-w", "-fsyntax-only", "-x", "c++", str(probe)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def test_without_nvcc_a_gate_is_left_out_in_words(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(build.NVCC_ENV, "/nowhere/nvcc")
    with pytest.raises(BuildError, match="no CUDA compiler"):
        build.cubins(["rms_norm"])
    assert check.gate("the ledger holds", build.nvcc, list) is None
    assert "left out: the ledger holds: no CUDA compiler (/nowhere/nvcc) on PATH" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_one_op_is_within_the_ledger_and_has_its_instructions() -> None:
    [made] = build.cubins(["swiglu"])
    old = json.loads(ledger.LEDGER.read_text())
    new = {"nvcc": ledger.release(), "kernels": {"swiglu": ledger.costs(made.ptxas)}}
    assert ledger.differences(old | {"kernels": {"swiglu": old["kernels"]["swiglu"]}}, new) == []
    try:
        kernels = disassembly.mnemonics(made.cubin)
    except BuildError as error:
        pytest.skip(str(error))
    assert disassembly.missing(json.loads(disassembly.EXPECT.read_text())["swiglu"], kernels) == []


def test_every_op_has_its_ledger_and_its_instructions() -> None:
    for book_of_ops in (_read(ledger.LEDGER)["kernels"], _read(disassembly.EXPECT)):
        assert set(build.ops()) == set(book_of_ops)
    assert set(_read(table.FORMS)) <= set(build.ops())


def test_an_op_without_a_suite_is_not_said_to_have_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "RAN", tmp_path / "ran.json")
    monkeypatch.setattr(table, "keys", lambda: {"ceiling": "a", "swiglu": "b"})
    monkeypatch.setattr(table, "unlaunched", lambda op, form, launched: [])
    table.mark_run([])
    assert [(op, ran) for op, *_, ran, _ in table.rows()] == [("ceiling", "no"), ("swiglu", "yes")]


def test_a_source_that_changed_since_its_suite_ran_is_not_said_to_have_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "RAN", tmp_path / "ran.json")
    table.mark_run(["swiglu swiglu<float>", "swiglu swiglu<float4>"])
    assert {row[-2] for row in table.rows() if row[0] == "swiglu"} == {"yes"}
    ran = _read(table.RAN) | {"swiglu": _read(table.RAN)["swiglu"] | {"sources": "another"}}
    table.RAN.write_text(json.dumps(ran))
    assert {row[-2] for row in table.rows() if row[0] == "swiglu"} == {"no"}
    assert {row[-1] for row in table.rows()} == {"no"}


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_asking_for_help_runs_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--help"])
    monkeypatch.setattr(check, "suites", pytest.fail)
    with pytest.raises(SystemExit, match="0"):
        check.main()
    assert "--strict" in capsys.readouterr().out


def test_what_check_does_not_know_goes_to_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    monkeypatch.setattr(sys, "argv", ["check", "--strict", "-k", "rope", "-x"])
    monkeypatch.setattr(check, "suites", lambda arguments: (given.append(arguments) is None, []))
    monkeypatch.setattr(check, "GATES", ())
    assert check.main() == 0
    assert given == [["-k", "rope", "-x"]]
