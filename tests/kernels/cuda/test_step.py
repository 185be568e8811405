"""The whole step from ``step/cuda.cu`` on the SIMT shim, with all ops under it, beside the CPU's step.

Device memory can't be touched by the host here, and a captured graph keeps its launches' arguments, as on a GPU.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine.adapters.base import AdapterBase
from baton.engine.backends.cuda import step_choice, warming
from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import AT_ONCE, BY_GRAPH, PLAIN, CudaRunner
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import StepPlan
from baton.engine.program import ops as p
from baton.engine.program.sites import adaptable, sites_of
from baton.kernels.abi import native
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.protos.errors import BatonError, ConfigError
from baton.protos.nouns import Sampling
from tests.engine.backends.cuda.test_adapters import adapter
from tests.kernels.cuda.steps import DRAWN, Kind, model, pages_agree, simt, steps
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

# Of an op on the same inputs. The GPU rounds attention's q and weights to bf16, matrices' inputs to 8 bits or bf16.
OPS = {
    p.Embedding: 1e-6,
    p.RmsNorm: 1e-5,
    p.Linear: 2e-2,
    p.RopeAppend: 1e-4,
    p.PagedAttention: 1e-2,
    p.SwiGlu: 1e-5,
}


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return simt()


@pytest.fixture
def pair(device: CudaLibrary) -> Iterator[Callable[..., tuple[NativeRunner, CudaRunner]]]:
    """The same layer of random weights on the CPU and on the shim, each with pages of its own."""
    made: list[CudaRunner] = []

    def of(
        kind: Kind = torch.bfloat16, kv: str = "bfloat16", on: CudaLibrary = device
    ) -> tuple[NativeRunner, CudaRunner]:
        program = trials.one_layer(model())
        spec, weights = trials.spec_of(program, kv), trials.random_weights(program, kind, 3)
        made.append(CudaRunner(spec, program, weights, on))
        runners = NativeRunner(spec, program, weights), made[-1]
        for runner in runners:
            runner.bind(memoryview(bytearray(trials.PAGES * spec.layout.page_bytes)), trials.PAGES)
        return runners

    yield of
    for runner in made:
        runner.close()


def test_an_adapter_beside_the_head_moves_what_its_rows_choose_alone(device: CudaLibrary) -> None:
    program = adaptable(trials.one_layer(model()))
    spec, weights = trials.spec_of(program, "bfloat16"), trials.random_weights(program, torch.bfloat16, 3)
    base = AdapterBase(sites_of(program), 256, 1 << 30)
    runners = (
        NativeRunner(spec, program, weights, adapters=base),
        CudaRunner(spec, program, weights, device, adapters=base),
    )
    (plan,) = islice(steps(trials.VOCAB, [5, 9, 3], Sampling(temperature=0.0)), 1)
    items = [msgspec.structs.replace(item, adapter="" if item.seq == 1 else "a") for item in plan.items]
    chosen = []
    for runner in runners:
        assert runner.adapters is not None
        runner.bind(memoryview(bytearray(trials.PAGES * spec.layout.page_bytes)), trials.PAGES)
        runner.adapters.hold("a", adapter(program, 8, 1, size=3.0, head=True))
        results = [runner.run(asked) for asked in (StepPlan(tuple(items)), plan)]
        chosen += [{found.seq: found.token_id for found in result.sampled} for result in results]
    runners[1].close()
    assert chosen[:2] == chosen[2:]
    assert [seq for seq in range(3) if chosen[0][seq] == chosen[1][seq]] == [1]


@pytest.mark.parametrize(
    ("kind", "kv", "shape"),
    [
        (torch.bfloat16, "bfloat16", {}),
        ((4, 32), "int8", {"heads": 6, "kv_heads": 2, "head_dim": 16, "norms": True}),
        ((8, 0), "fp8_e4m3", {"heads": 2, "kv_heads": 2, "window": 20}),
        (torch.float32, "bfloat16", {"heads": 8, "kv_heads": 1, "head_dim": 8}),
    ],
    ids=["bf16", "int4 over int8 KV, QK-norm", "int8 over fp8 KV, a window", "float32 matrices"],
)
def test_prompts_in_chunks_and_decodes_answer_as_on_the_cpu(
    device: CudaLibrary, kind: Kind, kv: str, shape: dict[str, Any]
) -> None:
    program, found = model(**shape), []

    def on_shim(*which: Any) -> CudaRunner:
        found.append(CudaRunner(*which, device))
        return found[-1]

    weights: Any = {"w": trials.random_weights(trials.one_layer(program), kind, 1)["o"]}
    assert trials.trial(program, weights, kv, NativeRunner, on_shim) == ""
    counts = found[0].counts()
    assert (counts["captured"], counts["replayed"]) == (1, 3)
    found[0].close()


@pytest.mark.parametrize("seed", [1, 2, 6])  # in one of them a row takes another expert than the CPU's
@pytest.mark.parametrize("kind", [torch.bfloat16, (8, 0)], ids=str)
def test_a_layer_of_experts_answers_as_on_the_cpu(device: CudaLibrary, kind: Kind, seed: int) -> None:
    layer = p.Moe("x", "logits", "up", "down", 6, 2, renormalise=True, out="y")
    program = msgspec.structs.replace(model(), ops=(*model().ops, layer))
    weights: Any = {"w": trials.random_weights(trials.one_layer(model()), kind, 1)["o"]}
    found: list[CudaRunner] = []

    def on_shim(*which: Any) -> CudaRunner:
        found.append(CudaRunner(*which, device))
        return found[-1]

    assert any(isinstance(op, p.Moe) for op in trials.one_layer(program).ops)
    assert trials.trial(program, weights, "bfloat16", NativeRunner, on_shim, seed) == ""
    found[0].close()


@pytest.mark.parametrize(("kind", "kv"), [(torch.bfloat16, "bfloat16"), ((4, 32), "int8")], ids=str)
def test_each_op_answers_as_the_cpus_on_the_same_inputs(pair: Any, kind: Kind, kv: str) -> None:
    cpu, gpu = pair(kind, kv)
    plan = next(trials.plans(cpu.spec.vocab_size, seed=2))
    with torch.inference_mode():
        batch = NativeBatch(plan, cpu.spec.vocab_size, trials.PAGES)
        cpu._compute(plan, batch)  # makes the arena
        gpu._reach(batch.reach)
        gpu._call("session_angles", gpu._session, gpu._rope_angles.data_ptr(), gpu._rope_angles.nbytes)
        gpu._call("session_upload", gpu._session, ctypes.byref(gpu._step(batch)), PLAIN)
        step = cpu._step(batch)
        step.angles, step.pages, step.arena = (t.data_ptr() for t in (cpu._rope_angles, cpu._memory, cpu._arena))
        for at, op in enumerate(gpu._program.ops[:-1]):
            whole = slice(0, batch.rows)
            registers = {name: gpu._rows(batch, name, whole) for name in gpu._program.registers} if at else {}
            for name, values in registers.items():
                cpu._program.register(cpu._arena, batch.rows, name).copy_(values)
            cpu._run(cpu._program.address, ctypes.byref(step), at, at + 1)
            gpu._call("session_run", gpu._session, at, at + 1, 1)
            name = op.out  # type: ignore[union-attr]
            want = cpu._program.register(cpu._arena, batch.rows, name)
            have = gpu._rows(batch, name, whole)
            assert float((have - want).norm() / want.norm()) <= OPS[type(op)], f"{at}: {op}"
    assert pages_agree(cpu, gpu, plan)


def test_a_replayed_graph_draws_as_launches_do_and_reads_lengths_and_seeds_anew(
    device: CudaLibrary, pair: Any
) -> None:
    answers = []
    for how in (PLAIN, BY_GRAPH):
        _, gpu = pair(torch.bfloat16)
        gpu.how = how
        asked = steps(gpu.spec.vocab_size, [15, 3], DRAWN)
        found = [gpu.run(next(asked)) for _ in range(6)]
        answers.append([[(s.seq, s.token_id) for s in result.sampled] for result in found])
        states = np.stack([result.pooled[0].last for result in found])
        answers[-1].append(states.tobytes())  # to the last bit
        counts = gpu.counts()
        assert (counts["captured"], counts["replayed"]) == ((0, 0) if how == PLAIN else (1, 4))
    assert answers[0] == answers[1]
    tokens = [token for result in answers[0][:-1] for _, token in result]
    assert len(set(tokens)) > 3


def test_batches_of_three_and_of_four_share_a_graph_and_the_padding_changes_nobody(pair: Any) -> None:
    _, gpu = pair(torch.bfloat16)
    _, alone = pair(torch.bfloat16)
    alone.how = PLAIN
    for runner in (gpu, alone):
        asked = steps(runner.spec.vocab_size, [4, 17, 2, 9], Sampling(temperature=0.0))
        found = []
        for number in range(5):
            plan = next(asked)
            found.append(runner.run(StepPlan(plan.items[: 3 if number in (1, 3) else 4]) if number else plan))
        runner.found = [sorted((s.seq, s.token_id) for s in result.sampled) for result in found]
        runner.last = [result.pooled[2].last.tobytes() for result in found]
    assert gpu.found == alone.found
    assert gpu.last == alone.last
    assert (gpu.counts()["captured"], gpu.counts()["replayed"]) == (1, 3)


def test_what_the_host_held_may_change_once_the_plan_is_uploaded(pair: Any) -> None:
    cpu, gpu = pair(torch.bfloat16)
    plan = next(steps(cpu.spec.vocab_size, [9, 20], Sampling(temperature=0.0)))
    want = cpu.run(plan)
    with torch.inference_mode():
        batch = NativeBatch(plan, cpu.spec.vocab_size, trials.PAGES)
        gpu._reach(batch.reach)
        gpu._call("session_angles", gpu._session, gpu._rope_angles.data_ptr(), gpu._rope_angles.nbytes)
        gpu._call("session_upload", gpu._session, ctypes.byref(gpu._step(batch)), PLAIN)
        tokens = batch.choices.copy()
        for array in (batch.tokens, batch.flat, batch.wanted, batch.choices, batch.items):
            array.view(np.uint8)[:] = 0x7F
        gpu._call("session_run", gpu._session, 0, len(gpu._program.ops), 1)
        gpu._call("session_fetch", gpu._session, tokens.ctypes.data, len(tokens))
    assert tokens["token"].tolist() == [sampled.token_id for sampled in want.sampled]


def test_pages_that_others_wrote_come_over_and_stay(pair: Any) -> None:
    """A handoff leaves the prompt's KV in the host's pages, and this device has seen none of it."""
    cpu, gpu = pair(torch.bfloat16, "int8")
    asked = steps(cpu.spec.vocab_size, [40, 21])
    cpu.run(next(asked))
    gpu._memory.copy_(cpu._memory.view(-1))
    for number in range(3):
        plan = next(asked)
        want, have = cpu.run(plan), gpu.run(plan)
        for seq in (0, 1):
            apart = np.linalg.norm(have.pooled[seq].last - want.pooled[seq].last)
            assert apart / np.linalg.norm(want.pooled[seq].last) < trials.STATES, number
    assert gpu.counts()["admitted"] == 3 + 2


def test_a_step_that_fails_says_so_and_its_repeat_brings_every_page_again(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, gpu = pair(torch.bfloat16)
    asked = steps(cpu.spec.vocab_size, [20])
    gpu.run(next(asked))
    plan, call = next(asked), gpu._device.call

    def failing(name: str, *rest: Any) -> None:
        if name == "session_run":
            raise DeviceError("session_run: an illegal address (status 700)")
        call(name, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(gpu._device, "call", failing)
        with pytest.raises(BatonError, match=r"failed on the GPU: .*illegal address"):
            gpu.run(plan)
    gpu.run(plan)
    assert gpu.counts()["admitted"] == 2


def test_a_session_that_cannot_be_opened_leaves_no_weights_on_the_device(
    device: CudaLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, call, put, release = set[int](), device.call, device.put, device.release

    def failing(name: str, *rest: Any) -> None:
        if name == "session_open":
            raise DeviceError("session_open: out of memory (status 2)")
        call(name, *rest)

    def putting(address: int, size: int) -> int:
        there.add(at := put(address, size))
        return at

    monkeypatch.setattr(device, "call", failing)
    monkeypatch.setattr(device, "put", putting)
    monkeypatch.setattr(device, "release", lambda at: (there.remove(at), release(at)))
    program = trials.one_layer(model())
    with pytest.raises(BatonError, match=r"device cuda: session_open: out of memory"):
        CudaRunner(trials.spec_of(program, "bfloat16"), program, trials.random_weights(program, (8, 0), 3), device)
    assert not there


def test_the_host_can_not_look_at_device_memory(device: CudaLibrary) -> None:
    """Host code that looks at device memory is found by this test, before it runs on a GPU."""
    code = (
        "import ctypes; from pathlib import Path; from baton.kernels.cuda.library import CudaLibrary\n"
        f"d = CudaLibrary(Path({str(device.path)!r})); at = d.put(id(d), 16); ctypes.string_at(at, 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path.cwd()).returncode == -11


@pytest.mark.parametrize("bug", ["GATHER", "SCALES"])
def test_planted_bugs_are_caught(pair: Any, bug: str) -> None:
    cpu, gpu = pair((8, 0), "int8", simt((f"-DBATON_MUTATION_CUDA_STEP_{bug}",)))
    plan = next(steps(cpu.spec.vocab_size, [19, 7], Sampling(temperature=0.0)))
    tokens = [[s.token_id for s in runner.run(plan).sampled] for runner in (cpu, gpu)]
    assert tokens[0] != tokens[1] or not pages_agree(cpu, gpu, plan)


def test_after_warming_no_decode_is_captured_and_no_graph_is_dropped_in_traffic(pair: Any) -> None:
    _, gpu = pair((8, 0), "int8")
    gpu.warms = True
    gpu.warm(2, 16)  # more rows than the prompts have
    warmed = gpu.counts()
    assert warmed["captured"] == len(warming.sizes(2)) == 2  # and none of the largest step
    drive = steps(gpu.spec.vocab_size, [4, 9], DRAWN)
    for _ in range(4):
        gpu.run(next(drive))
    found = gpu.counts()
    assert found["captured"] == warmed["captured"]
    assert found["replayed"] == warmed["replayed"] + 3  # the decodes; the prompts are of another size
    assert found["plain"] == warmed["plain"] + 1


def compare_soon(gpu: CudaRunner, monkeypatch: pytest.MonkeyPatch, slow: int) -> None:
    """Lets ``gpu`` compare both ways with one timed run of each step, on a clock that is slower for ``slow``."""
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += 2.0 if gpu.how == slow else 1.0
        return now

    monkeypatch.setattr(step_choice, "REPEATS", 1)
    monkeypatch.setattr(gpu, "_clock", clock)


@pytest.mark.parametrize(("slow", "taken"), first_now([(BY_GRAPH, AT_ONCE), (AT_ONCE, BY_GRAPH)]))
def test_small_steps_go_the_way_that_was_faster_before_traffic(
    pair: Any, monkeypatch: pytest.MonkeyPatch, slow: int, taken: int
) -> None:
    _, gpu = pair((8, 0), "int8")
    compare_soon(gpu, monkeypatch, slow)
    gpu.warms = gpu.compares = True
    gpu.warm(1, 16)
    assert gpu.how == taken
    ran = gpu.counts()["at_once"]
    gpu.run(next(steps(gpu.spec.vocab_size, [4], DRAWN)))
    assert (gpu.counts()["at_once"] > ran) == (taken == AT_ONCE)


@pytest.mark.parametrize("mixed", ["tokens", "pages"])
def test_a_megakernel_that_mixes_sequences_is_never_taken(
    pair: Any, monkeypatch: pytest.MonkeyPatch, mixed: str
) -> None:
    _, gpu = pair((8, 0), "int8")
    rehearse = gpu._rehearse

    def mixing(plan: StepPlan, context: int) -> list[int]:
        if gpu.how == AT_ONCE:
            taken = [getattr(item, mixed) for item in plan.items]
            pairs = zip(plan.items, [*taken[1:], taken[0]], strict=True)
            plan = StepPlan(tuple(msgspec.structs.replace(item, **{mixed: other}) for item, other in pairs))
        return list(rehearse(plan, context))

    compare_soon(gpu, monkeypatch, slow=BY_GRAPH)
    monkeypatch.setattr(gpu, "_rehearse", mixing)
    gpu.warms = gpu.compares = True
    gpu.warm(2, 16)
    assert gpu.how == BY_GRAPH


def test_a_megakernel_that_is_refused_before_traffic_leaves_the_graph(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(batch: object, brought: object) -> None:
        if gpu.how == AT_ONCE:
            raise DeviceError("too many blocks in a cooperative launch")

    _, gpu = pair((8, 0), "int8")
    monkeypatch.setattr(gpu, "_launch", refuse)
    gpu.warms = gpu.compares = True
    gpu.warm(2, 16)
    assert gpu.how == BY_GRAPH


def test_a_card_without_room_to_warm_ends_the_start_with_what_to_do(
    pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(batch: object, brought: object) -> None:
        raise DeviceError("out of memory")

    _, gpu = pair((8, 0), "int8")
    monkeypatch.setattr(gpu, "_launch", full)
    gpu.warm(4, 24)  # it warms where it is told to
    gpu.warms = True
    with pytest.raises(ConfigError, match=r"4 sequences and 24 tokens: out of memory; lower worker\.max_batch"):
        gpu.warm(4, 24)


@pytest.mark.parametrize(("how", "rows", "plain"), [(AT_ONCE, 8, True), (AT_ONCE, 9, False), (BY_GRAPH, 1, False)])
def test_nothing_is_launched_programmatically_behind_the_megakernel(
    pair: Any, monkeypatch: pytest.MonkeyPatch, how: int, rows: int, plain: bool
) -> None:
    called: list[tuple[str, int]] = []
    _, gpu = pair((8, 0), "int8")
    gpu.how = how
    with monkeypatch.context() as patch:
        patch.setattr(gpu._device, "call", lambda name, *rest: called.append((name, rest[0])))
        gpu._run(rows)
    run = ("session_run", gpu._session)
    assert called == ([("device_programmatic", 0), run, ("device_programmatic", 1)] if plain else [run])
