"""Adapters beside the layers of a step on the SIMT shim: the CPU's answers, in any company, replayed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import PackedAdapter, PackedPart, pack
from baton.engine.backends.cuda import trial as trials
from baton.engine.backends.cuda.runner import CudaRunner
from baton.engine.backends.native.runner import NativeRunner
from baton.engine.plan import StepPlan
from baton.engine.program import ops as p
from baton.engine.program.program import Program
from baton.engine.program.sites import HEAD_MODULE, Site, adaptable, expert_sites, sites_of
from baton.kernels.abi import native
from baton.kernels.cuda.library import CudaLibrary, DeviceError
from baton.kernels.lora.structs import panelled
from baton.protos.errors import AdapterNotLoaded, AdaptersFull, BatonError
from baton.protos.nouns import Sampling
from tests.kernels.cuda.steps import model, simt, steps
from tests.kernels.mutants import is_caught
from tests.thorough import first_now

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

OFTEN = ("a", "", "b")  # the adapters of three sequences
Pair = tuple[NativeRunner, CudaRunner]


def places(program: Program, head: bool) -> Iterator[Site]:
    """The head's site, or those of all other layers: beside experts of the gate of each second expert, of the up of
    each third one and of each down.
    """
    numbers, sites = expert_sites(program), sites_of(program)
    yield from (site for module, site in sites.items() if (module == HEAD_MODULE) is head and module not in numbers)
    for op in () if head else program.experts:
        for expert in range(op.experts):
            first = 2 * trials.INNER * expert
            if expert % 2:
                yield Site(numbers[op.gate_up], first, trials.INNER, trials.HIDDEN)
            if expert % 3 == 0:
                yield Site(numbers[op.gate_up], first + trials.INNER, trials.INNER, trials.HIDDEN)
            yield Site(numbers[op.down], trials.HIDDEN * expert, trials.HIDDEN, trials.INNER)


def adapter(program: Program, rank: int, seed: int, size: float = 0.4, head: bool = False) -> PackedAdapter:
    """Random matrices beside every layer and the embedding, or beside the ``head``, every second pair as bf16."""
    rng, parts, at = np.random.default_rng(seed), [], 0
    for number, site in enumerate(places(program, head)):
        narrow = number % 2 == 1
        sizes = [rank * site.inputs, rank * panelled(site.outputs)]
        a, b = (at, at + math.ceil(sizes[0] * 4 / 64) * 64)
        at = b + math.ceil(sizes[1] * 4 / 64) * 64
        parts.append(PackedPart(site, rank, size, narrow, a, b))
    found = PackedAdapter(tuple(parts), memoryview(bytearray(at)))
    for part in parts:
        a, b = (
            rng.standard_normal(shape, np.float32)
            for shape in ((rank, part.site.inputs), (part.site.outputs, rank))
        )
        pack(found, part, a * part.site.inputs**-0.5, b * rank**-0.5)
    return found


def layer(experts: bool) -> Program:
    """One layer, perhaps of six experts of which each row has two."""
    of = model()
    if experts:
        moe = p.Moe("x", "logits", "up", "down", 6, 2, renormalise=True, out="y")
        of = msgspec.structs.replace(of, ops=(*of.ops, moe))
    return trials.one_layer(of)


@pytest.fixture(scope="module")
def device() -> CudaLibrary:
    return simt()


@pytest.fixture
def pair(device: CudaLibrary) -> Iterator[Callable[..., Pair]]:
    """One layer with places for adapters on the CPU and on the shim; ``bare``: the shim's without places."""
    made: list[CudaRunner] = []

    def of(kind: Any = torch.bfloat16, bare: bool = False, on: CudaLibrary = device, experts: bool = False) -> Pair:
        plain = layer(experts)
        program = adaptable(plain)
        spec, weights = trials.spec_of(plain, "bfloat16"), trials.random_weights(plain, kind, 3)
        base = AdapterBase(sites_of(program), 256, 1 << 30)
        if bare:
            made.append(CudaRunner(spec, plain, weights, on))
        else:
            made.append(CudaRunner(spec, program, weights, on, adapters=base))
        runners = NativeRunner(spec, program, weights, adapters=base), made[-1]
        for runner in runners:
            runner.bind(memoryview(bytearray(trials.PAGES * spec.layout.page_bytes)), trials.PAGES)
            if runner.adapters is not None:
                runner.adapters.hold("a", adapter(program, 4, 1))
                runner.adapters.hold("b", adapter(program, 40, 2))
        return runners

    yield of
    for runner in made:
        runner.close()


def plans(adapters: tuple[str, ...] = OFTEN, count: int = 4, sampling: Sampling | None = None) -> list[StepPlan]:
    """Prompts, then decodes, each sequence on its adapter."""
    return [
        StepPlan(tuple(msgspec.structs.replace(item, adapter=adapters[item.seq]) for item in plan.items))
        for plan in islice(steps(trials.VOCAB, [5, 9, 3], sampling), count)
    ]


def states(runner: NativeRunner | CudaRunner, adapters: tuple[str, ...] = OFTEN) -> list[dict[int, np.ndarray]]:
    found = [runner.run(plan).pooled for plan in plans(adapters)]
    return [{seq: pooled.last.copy() for seq, pooled in one.items()} for one in found]


def agree(cpu: NativeRunner, gpu: CudaRunner, first: int = 0) -> None:
    """Hidden states are as close as the start's trial asks."""
    for plan in plans()[first:]:
        wanted, found = cpu.run(plan).pooled, gpu.run(plan).pooled
        for seq, states in wanted.items():
            apart = np.linalg.norm(found[seq].last - states.last) / np.linalg.norm(states.last)
            assert apart <= trials.STATES, seq


@pytest.mark.parametrize("kind", first_now([torch.bfloat16, (8, 0), (4, 32)], 1, whole=True), ids=str)
def test_each_row_answers_on_its_adapter_as_on_the_cpu_and_steps_are_replayed(pair: Any, kind: Any) -> None:
    cpu, gpu = pair(kind)
    agree(cpu, gpu)
    assert gpu.counts()["captured"] == 1
    assert gpu.counts()["replayed"] == 2


@pytest.mark.thorough  # of what is chosen: test_rows_of_no_adapter_choose_as_without_and_company_changes_no_bit
def test_a_rows_bits_are_those_it_has_without_places_or_in_other_company(pair: Any) -> None:
    mixed, one, none = states(pair()[1]), states(pair()[1], ("a", "a", "a")), states(pair(bare=True)[1], ("",) * 3)
    for three, same, plain in zip(mixed, one, none, strict=True):
        assert np.array_equal(three[0], same[0])
        assert np.array_equal(three[1], plain[1])
        assert not np.array_equal(three[0], plain[0])


@pytest.mark.thorough
def test_a_step_without_adapters_launches_what_a_program_without_places_does(
    pair: Any, device: CudaLibrary
) -> None:
    taken = []
    for bare in (False, True):
        runner, count = pair(bare=bare)[1], device.library.baton_simt_launches
        before = count()
        answers = states(runner, ("",) * 3)
        taken.append((count() - before, [one[0].tobytes() for one in answers]))
    assert taken[0] == taken[1]


def test_beside_experts_each_row_answers_as_on_the_cpu_and_steps_are_replayed(pair: Any) -> None:
    cpu, gpu = pair(experts=True)
    agree(cpu, gpu)
    assert (gpu.counts()["captured"], gpu.counts()["replayed"]) == (1, 2)


@pytest.mark.thorough  # of the op alone: tests/kernels/cuda/test_moe.py
def test_beside_experts_a_rows_bits_are_those_of_a_bare_layer_or_of_other_company(pair: Any) -> None:
    """A step that no adapter is in launches what a layer without places does."""
    _, gpu = pair(experts=True)
    mixed, one, none = states(gpu), states(gpu, ("a", "a", "a")), states(gpu, ("",) * 3)
    bare = states(pair(bare=True, experts=True)[1], ("",) * 3)
    for three, same, without, plain in zip(mixed, one, none, bare, strict=True):
        assert np.array_equal(three[0], same[0])
        assert np.array_equal(three[1], plain[1])
        assert np.array_equal(without[0], plain[0])
        assert not np.array_equal(three[0], plain[0])


def test_a_replaced_content_is_the_next_steps_and_captured_graphs_stay(pair: Any) -> None:
    cpu, gpu = pair()
    agree(cpu, gpu)
    captured = gpu.counts()["captured"]
    for runner in (cpu, gpu):
        runner.adapters.drop("a")
        runner.adapters.hold("a", adapter(adaptable(trials.one_layer(model())), 16, 7))
    agree(cpu, gpu, first=3)
    assert gpu.counts()["captured"] == captured


def test_what_is_dropped_or_closed_leaves_no_memory_on_the_card(
    pair: Any, device: CudaLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, allocate, release = set[int](), device.allocate, device.release
    monkeypatch.setattr(device, "allocate", lambda size: (there.add(found := allocate(size)), found)[1])
    monkeypatch.setattr(device, "release", lambda at: (there.remove(at), release(at)))
    _, gpu = pair()
    weights = len(there) - 6
    gpu.adapters.drop("a")
    assert len(there) == weights + 3
    with pytest.raises(AdapterNotLoaded):
        gpu.run(plans()[0])
    gpu.close()
    assert not there


def test_a_card_without_room_refuses_the_adapter_by_name_and_keeps_nothing(
    pair: Any, device: CudaLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, gpu = pair()
    there, allocate, release = set[int](), device.allocate, device.release

    def full(size: int) -> int:
        if len(there) == 2:
            raise DeviceError("device_allocate: out of memory (status 2)")
        there.add(found := allocate(size))
        return found

    monkeypatch.setattr(device, "allocate", full)
    monkeypatch.setattr(device, "release", lambda at: (there.remove(at), release(at)))
    with pytest.raises(AdaptersFull, match=r"the card has no room for adapter c@1: .*out of memory"):
        gpu.adapters.hold("c@1", adapter(adaptable(trials.one_layer(model())), 4, 1))
    assert not there


def with_heads(runners: Pair, names: str = "ab") -> Pair:
    """Returns the same runners, whose adapters ``names`` stand beside the head alone."""
    program = adaptable(trials.one_layer(model()))
    for runner in runners:
        assert runner.adapters is not None
        for seed, name in enumerate(names, 1):
            runner.adapters.drop(name)
            runner.adapters.hold(name, adapter(program, 8 * seed, seed, size=3.0, head=True))
    return runners


def said(runner: NativeRunner | CudaRunner, sampling: Sampling, adapters: tuple[str, ...] = OFTEN) -> list[Any]:
    """Returns what each sequence chooses in each of four steps."""
    return [
        sorted((found.seq, found.token_id) for found in runner.run(plan).sampled)
        for plan in plans(adapters, 4, sampling)
    ]


def heads_agree(cpu: NativeRunner, gpu: CudaRunner) -> None:
    """Logits are as close as products of bf16 are, and as attention of which one side rounds q and weights to bf16;
    tokens are the same.
    """
    for plan in plans(count=3, sampling=Sampling(temperature=0.0, logprobs=20)):
        tops = [
            {
                found.seq: {one.token_id: one.logprob for one in found.logprobs.top}
                for found in runner.run(plan).sampled
            }
            for runner in (cpu, gpu)
        ]
        for seq, top in tops[0].items():
            both = top.keys() & tops[1][seq].keys()
            assert len(both) >= 18, seq
            assert max(abs(top[token] - tops[1][seq][token]) for token in both) < 0.2, seq
    for sampling in (Sampling(temperature=0.0), Sampling(temperature=0.7, seed=3)):
        assert said(cpu, sampling) == said(gpu, sampling)


def test_adapters_beside_the_head_choose_as_on_the_cpu_and_steps_are_replayed(pair: Any) -> None:
    cpu, gpu = with_heads(pair())
    before = said(pair()[1], Sampling(temperature=0.0), ("", "", ""))
    assert said(gpu, Sampling(temperature=0.0)) != before
    heads_agree(cpu, gpu)
    assert gpu.counts()["replayed"] > 0


def test_rows_of_no_adapter_choose_as_without_and_company_changes_no_bit(pair: Any) -> None:
    drawn = Sampling(temperature=0.9, seed=5, logprobs=3)
    _, gpu = with_heads(pair())
    mixed, same, none = (plans(on, 3, drawn) for on in (OFTEN, ("a",) * 3, ("",) * 3))
    for three, one, plain in zip(mixed, same, none, strict=True):
        by_seq = [{found.seq: found for found in gpu.run(plan).sampled} for plan in (three, one, plain)]
        assert by_seq[0][0] == by_seq[1][0]
        assert by_seq[0][1] == by_seq[2][1]
        assert by_seq[0][0].logprobs != by_seq[2][0].logprobs


def test_an_adapter_that_leaves_the_head_alone_costs_no_room_for_logits(pair: Any, device: CudaLibrary) -> None:
    taken = []
    for beside in (False, True):
        _, gpu = pair()
        if beside:
            with_heads((gpu,))
        count = device.library.baton_simt_launches
        (plan,) = plans(count=1, sampling=Sampling(temperature=0.0))
        before = count()
        gpu.run(plan)
        taken.append(count() - before)
    assert taken[1] == taken[0] + 3  # of cleared room, shrink and expand


@pytest.mark.thorough
@pytest.mark.parametrize("bug", ["LORA_GROUP", "STEP_ADAPTERS"])
def test_a_planted_bug_is_caught(pair: Any, bug: str) -> None:
    cpu, gpu = pair(on=simt((f"-DBATON_MUTATION_CUDA_{bug}",)))
    assert is_caught(gpu, [lambda gpu: agree(cpu, gpu)])


@pytest.mark.thorough
@pytest.mark.parametrize("bug", ["MOE_EXPERT", "MOE_ADAPTER", "MOE_PART"])
def test_a_planted_bug_beside_experts_is_caught(pair: Any, bug: str) -> None:
    cpu, gpu = pair(on=simt((f"-DBATON_MUTATION_CUDA_{bug}",)), experts=True)
    assert is_caught(gpu, [lambda gpu: agree(cpu, gpu)])


@pytest.mark.thorough
def test_room_that_isnt_cleared_is_caught(pair: Any) -> None:
    cpu, gpu = with_heads(pair(on=simt(("-DBATON_MUTATION_CUDA_STEP_HEAD",))))
    with pytest.raises(BatonError, match="no finite logit"):  # new memory of the shim is full of NaN
        heads_agree(cpu, gpu)


@pytest.mark.parametrize("experts", first_now([False, True], 1), ids=["dense", "experts"])
def test_what_adapted_steps_need_is_there_before_traffic(pair: Callable[..., Pair], experts: bool) -> None:
    """A workspace that grew in a step with adapters would drop the graphs of those without."""
    _, gpu = pair(experts=experts)
    gpu.warms = True
    gpu.warm(3, 16)
    before, greedy = gpu.counts(), Sampling(temperature=0.0)
    for plan in plans(count=2, sampling=greedy):
        gpu.run(plan)
    gpu.run(plans(adapters=("", "", ""), count=3, sampling=greedy)[2])
    after = gpu.counts()
    assert after["captured"] == before["captured"]
    assert after["replayed"] == before["replayed"] + 1
