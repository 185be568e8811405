"""Tests whether CUDA steps have the CPU's results on this machine, with one layer of random weights.

Knows nothing of checkpoints. The layer has the heads, head size, rope, KV dtype and kind of weights of the model
that is to run. Prompts are computed in chunks, then tokens are decoded by launches and by graph, then trees of
drafts are verified. On a card a long chunk of a prompt follows, which other kernels attend to. Hidden states and
the likelihood of given tokens are compared, not chosen tokens, because of ties.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.native.program import Weights
from baton.engine.plan import DraftBranch, ModelSpec, Runner, SequenceStep, StepPlan, StepResult
from baton.engine.program import ops as p
from baton.engine.program.program import Program, Weight
from baton.kernels.linear.packed import BF16, W4, PackedWeight, quantize
from baton.kv.layout.page import layout_for
from baton.protos.errors import BatonError
from baton.protos.nouns import BLOCK_TOKENS, LayerGroup

# Sizes of the trial's model, and its pages: small, because a start waits for the trial.
HIDDEN, INNER, VOCAB, PAGES = 256, 384, 320, 16
# Tokens of the prompts and of a chunk, and steps that decode: whole and part blocks occur.
PROMPTS, CHUNK, DECODES = (5, 37, 18), 16, 4
LONG = 300  # tokens of a long chunk: more than the rows of a step that is captured (session.cuh)
DRAFTED = 2  # sequences with a tree of drafts: of four rows each, as many as the megakernel takes
# Tolerances: ‖GPU - CPU‖ / ‖CPU‖ of a hidden state; difference of a log-likelihood. The GPU rounds q and
# attention weights to bf16, and activations before bf16 matrices, as the CPU does.
STATES, LOGPROB = 0.03, 0.3
# Of so many states one may be off where there are experts: of two that are nearly as good a row takes either's.
CHOICES = 16

Make = Callable[[ModelSpec, Program, Weights], Runner]


def trial(
    model: Program,
    weights: Weights,
    kv_dtype: str,
    expected: Make,
    found: Make,
    seed: int = 1,
    long: bool = False,
) -> str:
    """Returns how the results of the runner that ``found`` makes differ from those of ``expected``, in words; empty
    if they agree.

    Both run one layer of random weights, of the kinds of ``model`` and ``weights``. ``long`` adds a long chunk, for
    which the shim takes seconds.
    """
    program = one_layer(model)
    spec = spec_of(program, kv_dtype)
    made = random_weights(program, kind_of(model, weights), seed)
    try:
        answers = [_run(make(spec, program, made), seed, long) for make in (expected, found)]
    except BatonError as error:
        return error.message
    off = [
        f"step {number} of the trial: {said}"
        for number, (want, have) in enumerate(zip(*answers, strict=True))
        for said in _off(want, have)
    ]
    few = sum(len(want.pooled) for want in answers[0]) // CHOICES if program.experts else 0
    return off[0] if len(off) > few else ""


def one_layer(model: Program) -> Program:
    """Returns a small program of one decoder layer with the attention of ``model``, and its experts if it has
    any.
    """
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    eps, norms = 1e-5, any(isinstance(op, p.RopeAppend) and op.q_norm for op in model.ops)
    window = max((op.window for op in model.ops if isinstance(op, p.PagedAttention)), default=0)
    shapes = {
        "embed": (VOCAB, HIDDEN),
        **dict.fromkeys(("n1", "n2", "n3"), (HIDDEN,)),
        **(dict.fromkeys(("qn", "kn"), (model.head_dim,)) if norms else {}),
        "qkv": (q + 2 * kv, HIDDEN),
        "o": (HIDDEN, q),
        **_shapes(model),
        "head": (VOCAB, HIDDEN),
    }
    ops = (
        p.Embedding("embed", "x"),
        p.RmsNorm("x", None, "n1", eps, "normed"),
        p.Linear("normed", "qkv", None, "qkv"),
        p.RopeAppend("qkv", 0, "qn" if norms else None, "kn" if norms else None, eps, "q"),
        p.PagedAttention("q", 0, min(window, 24), "attended"),
        p.Linear("attended", "o", None, "delta"),
        p.RmsNorm("x", "delta", "n2", eps, "normed"),
        *_behind_attention(model),
        p.LmHead("x", "delta", "n3", eps, "head"),
    )
    return msgspec.structs.replace(
        model,
        ops=ops,
        weights=tuple(Weight(name, (name,), (shape,)) for name, shape in shapes.items()),
        groups=(LayerGroup("full", ("k", "v"), 1, model.kv_heads, model.head_dim),),
        vocab_size=VOCAB,
    )


def _shapes(model: Program) -> dict[str, tuple[int, ...]]:
    if not model.experts:
        return {"gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    of = model.experts[0].experts
    return {"router": (of, HIDDEN), "gate_up": (of * 2 * INNER, HIDDEN), "down": (of * HIDDEN, INNER)}


def _behind_attention(model: Program) -> tuple[p.Op, ...]:
    if not model.experts:
        return (
            p.Linear("normed", "gate_up", None, "gate_up"),
            p.SwiGlu("gate_up", "inner"),
            p.Linear("inner", "down", None, "delta"),
        )
    layer = msgspec.structs.replace(
        model.experts[0], x="normed", logits="logits", gate_up="gate_up", down="down", out="delta"
    )
    return p.Linear("normed", "router", None, "logits"), layer


def spec_of(program: Program, kv_dtype: str) -> ModelSpec:
    """Returns a spec for ``program`` with KV of ``kv_dtype``, for a runner of the trial."""
    return ModelSpec("", layout_for(kv_dtype, program.groups), program.max_position, program.vocab_size, ())


def random_weights(program: Program, kind: tuple[int, int] | torch.dtype, seed: int) -> Weights:
    """Returns random weights for ``program``. ``kind`` is (bits, group size) of quantized matrices, or one dtype
    for all.
    """
    draw = torch.Generator().manual_seed(seed)
    matrices = {op.weight for op in program.ops if isinstance(op, p.Linear | p.LmHead)}
    experts, routers = {name for op in program.experts for name in (op.gate_up, op.down)}, program.routers
    plain = kind if isinstance(kind, torch.dtype) else torch.bfloat16
    made: Weights = {}
    for weight in program.weights:
        [shape] = weight.shapes
        scale = 1.0 if len(shape) == 1 or weight.name not in matrices | experts else shape[-1] ** -0.5
        values = torch.randn(shape, generator=draw) * scale + (len(shape) == 1) * 2.0
        if weight.name in routers:
            made[weight.name] = values
        elif weight.name in experts:
            made[weight.name] = values.to(torch.bfloat16)
        elif weight.name in matrices and isinstance(kind, tuple):
            made[weight.name] = quantize(values, *kind)
        else:
            made[weight.name] = values.to(plain)
    return made


def kind_of(model: Program, weights: Weights) -> tuple[int, int] | torch.dtype:
    """Returns the kind of a program's matrices, by its first one: (bits, group size), or a dtype."""
    first: Tensor | PackedWeight = next(weights[op.weight] for op in model.ops if isinstance(op, p.Linear))
    if isinstance(first, Tensor):
        return first.dtype
    return torch.bfloat16 if first.kind == BF16 else (4 if first.kind == W4 else 8, first.group)


def plans(vocab: int, seed: int) -> Iterator[StepPlan]:
    """Yields step plans with random tokens: prompts in chunks, together with decodes of finished ones, then decodes
    alone, then trees of drafts, and decodes behind a branch of them.
    """
    rng = np.random.default_rng(seed)
    tokens = [rng.integers(0, vocab, count + 64).tolist() for count in PROMPTS]
    tables = np.array_split(rng.permutation(PAGES).tolist(), len(PROMPTS))
    done = [0] * len(PROMPTS)
    left = DECODES
    while left:
        counts = [min(CHUNK, most - at) if at < most else 1 for at, most in zip(done, PROMPTS, strict=True)]
        left -= all(at >= most for at, most in zip(done, PROMPTS, strict=True))
        yield StepPlan(
            tuple(
                SequenceStep(
                    seq,
                    tokens[seq][at : at + count],
                    at,
                    tables[seq].tolist(),
                    targets=tokens[seq][at + 1 : at + count + 1],
                    pool=True,
                )
                for seq, (at, count) in enumerate(zip(done, counts, strict=True))
            )
        )
        done = [at + count for at, count in zip(done, counts, strict=True)]
    trees = [_tree(seq, tokens[seq], done[seq], tables[seq].tolist()) for seq in range(DRAFTED)]
    yield StepPlan(tuple(trees))
    yield StepPlan(tuple(_behind(item) for item in trees))


def _tree(seq: int, tokens: list[int], at: int, table: list[int]) -> SequenceStep:
    """Returns the item of a text's last token, two drafts behind it, and one beside the first of these, whose pages
    are the table's last.
    """
    blocks = (at + 1) // BLOCK_TOKENS - at // BLOCK_TOKENS + 1
    branch = DraftBranch(parent=0, first=3, rows=1, pages=table[-blocks:])
    drafted = tokens[at : at + 4]
    return SequenceStep(seq, drafted, at, table, targets=drafted, pool=True, draft_branches=(branch,))


def _behind(item: SequenceStep) -> SequenceStep:
    """Returns a decode behind the item's branch."""
    first, token = item.start // BLOCK_TOKENS, item.tokens[1]
    [branch] = item.draft_branches
    pages = [*item.pages[:first], *branch.pages, *item.pages[first + len(branch.pages) :]]
    return SequenceStep(item.seq, [token], item.start + 2, pages, targets=[token], pool=True)


def long_chunk(vocab: int, seed: int) -> StepPlan:
    """Returns a step of a long chunk and two short ones, on the pages behind those of ``plans``."""
    rng, first, items = np.random.default_rng(seed), PAGES, list[SequenceStep]()
    for seq, count in enumerate((LONG, 40, 1), len(PROMPTS)):
        blocks = -(-count // BLOCK_TOKENS)
        table = list(range(first, first + blocks))
        items.append(SequenceStep(seq, rng.integers(0, vocab, count).tolist(), 0, table, pool=True))
        first += blocks
    return StepPlan(tuple(items))


def _run(runner: Runner, seed: int, long: bool) -> list[StepResult]:
    vocab, chunk = runner.spec.vocab_size, long_chunk(runner.spec.vocab_size, seed)
    pages = 1 + max(page for item in chunk.items for page in item.pages) if long else PAGES
    runner.bind(memoryview(bytearray(pages * runner.spec.layout.page_bytes)), pages)
    return [runner.run(plan) for plan in (*plans(vocab, seed), *([chunk] if long else []))]


def _off(want: StepResult, have: StepResult) -> Iterator[str]:
    """Yields for each sequence how its results differ, if they do."""
    for seq, pooled in want.pooled.items():
        error = np.linalg.norm(have.pooled[seq].last - pooled.last) / np.linalg.norm(pooled.last)
        pairs = zip(have.scored.get(seq, ()), want.scored.get(seq, ()), strict=True)
        apart = max((abs(a.chosen.logprob - b.chosen.logprob) for a, b in pairs), default=0.0)
        if not error <= STATES:
            yield f"a hidden state is {error:.1e} off the CPU's, at most {STATES}"
        elif not apart <= LOGPROB:
            yield f"a token's log-likelihood is {apart:.2f} off the CPU's, at most {LOGPROB}"
