"""A whole decode step of an 8B Llama with random weights, and a prompt's chunk, by launches and by graph.

Knows nothing of the ops beneath. The step is the engine's own (engine/backends/cuda/runner.py): what is timed is
what a worker runs, the plan's copy, the choice of tokens and the rows that go back to the host's pages included.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import partial

import numpy as np
import torch

from baton.engine.backends.cuda.runner import AT_ONCE, BY_GRAPH, PLAIN, CudaRunner
from baton.engine.backends.native.batch import NativeBatch
from baton.engine.plan import ModelSpec, SampleSpec, SequenceStep, StepPlan
from baton.engine.program import ops as p
from baton.engine.program.program import Program, Rope, Weight
from baton.kernels.cuda.library import CudaLibrary
from baton.kernels.linear.packed import PackedWeight
from baton.kv.layout.page import layout_for
from baton.protos.nouns import LayerGroup, Sampling
from bench.cuda.clock import Call, launched
from bench.cuda.extent import used
from bench.cuda.right import EXACT, judged
from bench.cuda.rows import Ceilings, Row, Sample, absent, rated, versus

MEGA_ROWS = 8  # mega.h
KINDS = {"bf16": (0, 16), "int8": (1, 8), "int4 g128": (2, 4)}  # LinearKind, bits
GREEDY = Sampling(temperature=0.0)


def steps(device: CudaLibrary, top: Ceilings, kinds: tuple[str, ...] = tuple(KINDS)) -> Iterator[Row]:
    """Rows of each kind of weights."""
    for kind in kinds:
        try:
            runner, nbytes = runner_of(device, kind)
        except Exception as error:  # memory, most likely: the other kinds may do
            yield absent("step", f"8B {kind}", f"{type(error).__name__}: {error}")
            continue
        try:
            yield from _of(runner, nbytes, top, used().step.batches, kind)
        finally:
            runner.close()


def _of(runner: CudaRunner, nbytes: int, top: Ceilings, batches: tuple[int, ...], kind: str) -> Iterator[Row]:
    sizes = used().step
    pages = -(-(sizes.length + 1) // 16) * max(batches)
    memory = np.resize(
        np.random.default_rng(1).integers(0, 0x40, 1 << 24, np.uint8), pages * runner.spec.layout.page_bytes
    )
    runner.bind(memory.data, pages)  # small numbers in whatever format
    token = runner.spec.layout.page_bytes / 16
    for batch in batches:
        plan, name = decodes(batch, pages), f"8B {kind} decode B={batch} L={sizes.length}"
        work = nbytes + batch * sizes.length * token
        runner.how = PLAIN
        launches = launched(partial(runner.run, plan), samples=sizes.samples)
        yield rated("step", f"{name}, launches", launches, work, "read", top)
        plain = answers(runner, plan)
        runner.how = BY_GRAPH
        for how, programmatic, goal in (("graph", 0, 0.7), ("graph and PDL", 1, 0.8)):
            runner._call("device_programmatic", programmatic)
            runner.bind(memory.data, pages)  # what was captured is forgotten
            error = unlike(plain, answers(runner, plan))
            found = launched(partial(runner.run, plan), samples=sizes.samples)
            yield judged(rated("step", f"{name}, {how}", found, work, "read", top, goal), error, EXACT)
            alone_ = launched(alone(runner, plan), samples=sizes.samples)
            yield rated("step", f"{name}, {how}, the replay alone", alone_, work, "read", top, goal)
        yield versus("step", f"{name}, graph and PDL beside launches", found, "launches", launches)
        if batch <= MEGA_ROWS:
            yield from _at_once(runner, plan, name, work, top, found, plain)
    runner.how = PLAIN
    prompt = StepPlan((SequenceStep(0, [7] * sizes.chunk, 0, list(range(sizes.chunk // 16))),))
    took = launched(partial(runner.run, prompt), samples=4, repeats=2)
    flops = (
        2.0 * body() * sizes.chunk
        + 2.0 * sizes.shape.layers * sizes.chunk**2 * sizes.shape.heads * sizes.shape.head_dim
    )
    yield rated(
        "step", f"8B {kind} prompt of {sizes.chunk}", took, flops, "flops", top, 0.6 if kind == "bf16" else None
    )


def _at_once(
    runner: CudaRunner, plan: StepPlan, name: str, work: float, top: Ceilings, graph: Sample, plain: list[int]
) -> Iterator[Row]:
    """The megakernel, beside the graph."""
    samples = used().step.samples
    if said := runner.misfit():
        yield absent("step", f"{name}, megakernel", said)
        return
    runner.how = AT_ONCE  # what was captured is forgotten
    error = unlike(plain, answers(runner, plan))
    found = launched(partial(runner.run, plan), samples=samples)
    yield judged(rated("step", f"{name}, megakernel", found, work, "read", top, 0.85), error, EXACT)
    replay = launched(alone(runner, plan), samples=samples)
    yield rated("step", f"{name}, megakernel, the replay alone", replay, work, "read", top, 0.85)
    yield versus("step", f"{name}, megakernel beside graph and PDL", found, "graph and PDL", graph)


def answers(runner: CudaRunner, plan: StepPlan) -> list[int]:
    """The tokens that a third run of the step chooses, when what can be captured has been."""
    return [[one.token_id for one in runner.run(plan).sampled] for _ in range(3)][-1]


def unlike(wanted: list[int], found: list[int]) -> float:
    """The share of tokens that are others; every way of launching promises the same bits."""
    return sum(mine != theirs for mine, theirs in zip(wanted, found, strict=True)) / max(1, len(wanted))


def body() -> int:
    """Elements of all matrices but the head, which a prompt's chunk without a sample doesn't read."""
    program = llama()
    names = {op.weight for op in program.ops if isinstance(op, p.Linear)}
    return sum(weight.shapes[0][0] * weight.shapes[0][1] for weight in program.weights if weight.name in names)


def alone(runner: CudaRunner, plan: StepPlan) -> Call:
    """The replay by itself: no plan, no results, no Python around it but the call."""
    runner.run(plan)
    runner.run(plan)  # captured
    batch = NativeBatch(plan, runner.spec.vocab_size, runner._pages)
    runner._call("session_upload", runner._session, ctypes.byref(runner._step(batch)), runner.how)

    def run() -> None:
        runner._call("session_run", runner._session, 0, len(runner._program.ops), 1)
        runner._call("session_wait", runner._session)

    return run


def decodes(batch: int, pages: int) -> StepPlan:
    """Returns a step that adds a token to each of ``batch`` sequences, whose pages follow one another."""
    length = used().step.length
    each = pages // batch
    spec = SampleSpec(GREEDY, 0, length + 1, (), length)
    return StepPlan(
        tuple(
            SequenceStep(seq, [seq + 1], length - 1, range(seq * each, seq * each + each), spec)
            for seq in range(batch)
        )
    )


def runner_of(device: CudaLibrary, kind: str) -> tuple[CudaRunner, int]:
    """The runner, and the bytes of all matrices that a decode reads."""
    program = llama()
    weights: dict[str, torch.Tensor | PackedWeight] = {}
    matrices = {op.weight for op in program.ops if isinstance(op, p.Linear | p.LmHead)}
    shared: dict[tuple[int, ...], PackedWeight] = {}
    nbytes = 0
    for weight in program.weights:
        [shape] = weight.shapes
        if weight.name not in matrices:
            weights[weight.name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        made = weights[weight.name] = shared.setdefault(shape, random_matrix(kind, *shape))
        nbytes += made.nbytes
    spec = ModelSpec("", layout_for("bfloat16", program.groups), program.max_position, program.vocab_size, ())
    return CudaRunner(spec, program, weights, device), nbytes


def random_matrix(kind: str, n: int, k: int) -> PackedWeight:
    """Random bits in the panels' layout: nobody looks at the values, and quantizing 8B of them takes minutes."""
    number, bits = KINDS[kind]
    panels = -(-n // 64)
    data = torch.randint(0, 0x40 if kind == "bf16" else 256, (panels * 64 * k * bits // 8,), dtype=torch.uint8)
    if kind == "bf16":
        return PackedWeight(number, n, k, 0, data)
    rows = torch.full((panels * 64,), k**-0.5 / 64)
    scales = torch.ones(panels, k // 128, 64, dtype=torch.float16) if bits == 4 else None
    return PackedWeight(number, n, k, 128 if bits == 4 else 0, data, scales, None, rows)


def llama() -> Program:
    """Returns the program of an 8B Llama."""
    s, eps = used().step.shape, 1e-5
    layers = s.layers
    q, kv = s.heads * s.head_dim, s.kv_heads * s.head_dim
    sizes: dict[str, tuple[int, ...]] = {
        "qkv": (q + 2 * kv, s.hidden),
        "o": (s.hidden, q),
        "gate_up": (2 * s.inner, s.hidden),
    }
    sizes |= {"down": (s.hidden, s.inner), "n1": (s.hidden,), "n2": (s.hidden,)}
    weights = {"embed": (s.vocab, s.hidden), "norm": (s.hidden,), "head": (s.vocab, s.hidden)}
    ops: list[p.Op] = [p.Embedding("embed", "x")]
    for i in range(layers):
        weights |= {f"{i}.{name}": shape for name, shape in sizes.items()}
        ops += [
            p.RmsNorm("x", "delta" if i else None, f"{i}.n1", eps, "normed"),
            p.Linear("normed", f"{i}.qkv", None, "qkv"),
            p.RopeAppend("qkv", i, None, None, eps, "q"),
            p.PagedAttention("q", i, 0, "attended"),
            p.Linear("attended", f"{i}.o", None, "delta"),
            p.RmsNorm("x", "delta", f"{i}.n2", eps, "normed"),
            p.Linear("normed", f"{i}.gate_up", None, "gate_up"),
            p.SwiGlu("gate_up", "inner"),
            p.Linear("inner", f"{i}.down", None, "delta"),
        ]
    ops.append(p.LmHead("x", "delta", "norm", eps, "head"))
    return Program(
        tuple(ops),
        tuple(Weight(name, (name,), (shape,)) for name, shape in weights.items()),
        (LayerGroup("full", ("k", "v"), layers, s.kv_heads, s.head_dim),),
        Rope("default", 500_000.0, {}),
        *(s.heads, s.kv_heads, s.head_dim, s.vocab, 8192),
    )
