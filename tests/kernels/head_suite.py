"""Checks what holds of baton_lm_head, whichever library it is in; each check takes the library.

Raises AssertionError.

Two oracles: raw logits against the same numbers in float64, tokens against the reference's sampling of the
library's own logits with the same seeds. Knows nothing of pytest.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from baton.engine.backends.native.batch import fill
from baton.engine.plan import SampleSpec
from baton.engine.sampling import choose
from baton.kernels.abi.native import I32, I64, F, P, declare
from baton.kernels.linear.packed import PackedWeight
from baton.kernels.linear.packed_floats import pack_f32
from baton.kernels.sample.reference import sample
from baton.kernels.step.structs import CHOICE, LINEAR_F32
from baton.protos.nouns import Sampling
from tests.kernels import linear_suite

FORMS: dict[str, Callable[[Tensor], PackedWeight]] = {"float32": pack_f32, **linear_suite.FORMS}
# Vocabulary, width, rows.
SHAPES = ((1, 1, 1), (64, 64, 16), (63, 8, 3), (65, 15, 17), (130, 384, 67), (97, 385, 1), (200, 769, 130))
EDITS: list[dict[str, Any]] = [
    {},
    {"banned": (3, 9, 5000)},
    {"logit_bias": {7: 4.0, 40: -100.0, 900: 1.0}},
    {"repetition_penalty": 1.7, "history": [4, 8, 15, 16, 23, 42, 42]},
    {"frequency_penalty": 0.4, "presence_penalty": 0.9, "history": [2, 2, 2, 71, 71], "prompt": 2},
    {"allowed": lambda vocab: np.arange(vocab) % 3 == 0},
]
DRAWS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.8, "top_p": 0.7},
    {"temperature": 1.3, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.02},
]


def ask(**fields: Any) -> SampleSpec:
    """Returns how a row chooses its token: greedily unless ``fields`` say otherwise."""
    history = fields.pop("history", [1, 2, 3])
    prompt, banned = fields.pop("prompt", 1), fields.pop("banned", ())
    allowed = fields.pop("allowed", None)
    sampling = Sampling(**({"temperature": 0.0} | fields))
    return SampleSpec(sampling, 0, len(history), history, prompt, banned, allowed)


def asked(vocab: int, seeds: int) -> list[SampleSpec]:
    """Every edit with every draw."""
    return [
        ask(**edit, **draw, seed=seed)
        for edit in EDITS
        for draw in DRAWS
        for seed in range(seeds)
        if max(edit.get("history", [0])) < vocab
    ]


def drawn(
    library: ctypes.CDLL,
    weight: PackedWeight,
    x: Tensor,
    specs: list[SampleSpec],
    logits: dict[int, Tensor] | None = None,
    softcap: float = 0.0,
) -> list[int]:
    """Returns each row's token; rows in ``logits`` get their logits written there instead."""
    choices, kept = np.zeros(len(specs), CHOICE), []
    for row, spec in enumerate(specs):
        kept += fill(choices[row], spec, weight.n)
    for row, room in (logits or {}).items():
        choices[row]["logits"] = room.data_ptr()
    asked_for = weight.address, x.data_ptr(), x.stride(0), len(specs)
    if softcap:
        declare(library, "lm_head_capped", P, P, I64, I32, F, P)(*asked_for, softcap, choices.ctypes.data)
    else:
        declare(library, "lm_head", P, P, I64, I32, P)(*asked_for, choices.ctypes.data)
    return [int(token) for token in choices["token"]]


def logits_of(library: ctypes.CDLL, weight: PackedWeight, x: Tensor, softcap: float = 0.0) -> Tensor:
    """Raw logits of every row, (rows, vocab); what lies behind a row must stay what it was."""
    room = torch.full((len(x), weight.n + 5), torch.nan)
    tokens = drawn(library, weight, x, [ask() for _ in x], dict(enumerate(room)), softcap)
    assert tokens == [-1] * len(x)
    assert bool(room[:, weight.n :].isnan().all()), "it wrote past the vocabulary"
    return room[:, : weight.n].contiguous()


def logits_are_the_oracles(
    library: ctypes.CDLL, form: str, shapes: Sequence[tuple[int, int, int]] = SHAPES
) -> None:
    """Odd vocabularies and widths, from a strided view."""
    for n, k, rows in shapes:
        torch.manual_seed(n + k)
        weight = FORMS[form](torch.randn(n, k))
        x = torch.randn(rows, k + 3)[:, 2 : k + 2] * 3
        if weight.kind == LINEAR_F32:
            wide = weight.data.view(torch.float32).view(-1, k, 64).transpose(1, 2).reshape(-1, k)[:n]
            wanted = x.double() @ wide.double().T
        else:
            wanted = linear_suite.exact(x, weight)
        found = logits_of(library, weight, x)
        assert linear_suite.off(found, wanted) < 2e-6, (form, n, k, rows)


def tokens_are_the_references(
    library: ctypes.CDLL, vocab: int, seeds: int = 3, form: str = "float32", every: int = 1
) -> None:
    """The same seeds as the reference's sampling over the same logits: the same tokens."""
    torch.manual_seed(vocab)
    specs = asked(vocab, seeds)[::every]
    packed, x = FORMS[form](torch.randn(vocab, 40)), torch.randn(len(specs), 40) * 0.5
    logits = logits_of(library, packed, x)
    wanted = [found.token_id for found in choose(logits.clone(), range(len(specs)), specs, sample)]
    found = drawn(library, packed, x, specs)
    wrong = [(row, a, b) for row, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
    assert len(wrong) <= len(specs) // 200, wrong


def capped_logits_choose(library: ctypes.CDLL, vocab: int = 333) -> None:
    """A cap bends logits before anything else looks at them; the draws are of what it leaves."""
    torch.manual_seed(vocab)
    specs, cap = asked(vocab, 2), 2.0
    packed, x = pack_f32(torch.randn(vocab, 40)), torch.randn(len(specs), 40) * 0.5
    logits = logits_of(library, packed, x, cap)
    plain = logits_of(library, packed, x).double()
    torch.testing.assert_close(logits, (cap * (plain / cap).tanh()).float(), atol=1e-6, rtol=1e-6)
    wanted = [found.token_id for found in choose(logits.clone(), range(len(specs)), specs, sample)]
    found = drawn(library, packed, x, specs, softcap=cap)
    assert sum(a != b for a, b in zip(found, wanted, strict=True)) <= len(specs) // 100


def a_rows_choice_is_its_own(library: ctypes.CDLL, form: str, vocab: int = 1500, seeds: int = 4) -> None:
    """Alone, in company of any size and beside a NaN row, twice in a row: the same token."""
    torch.manual_seed(5)
    packed, specs = FORMS[form](torch.randn(vocab, 64)), asked(vocab, 1)[: len(DRAWS) * seeds]
    x = torch.randn(len(specs), 64)
    together, logits = drawn(library, packed, x, specs), logits_of(library, packed, x)
    assert drawn(library, packed, x, specs) == together
    for row in range(0, len(specs), 5):
        assert torch.equal(logits_of(library, packed, x[row : row + 1])[0], logits[row])
        assert drawn(library, packed, x[row : row + 1], [specs[row]]) == [together[row]]
    x[1] = torch.nan
    poisoned = drawn(library, packed, x, specs)
    assert poisoned == [together[0], -1, *together[2:]]


def logits_may_be_asked_for_beside_choices(library: ctypes.CDLL) -> None:
    """One row's logits go out, the rows around it choose as ever."""
    packed, x = pack_f32(torch.randn(150, 24)), torch.randn(4, 24)
    specs = [ask(temperature=1.0, seed=row) for row in range(4)]
    wanted, raw, room = drawn(library, packed, x, specs), logits_of(library, packed, x), torch.zeros(150)
    assert drawn(library, packed, x, specs, {2: room}) == [*wanted[:2], -1, wanted[3]]
    assert torch.equal(room, raw[2])


def rows_without_a_finite_logit_are_said(library: ctypes.CDLL) -> None:
    """-1 where a row has a NaN or nothing to choose from; its neighbours don't notice."""
    for form in ("float32", "bf16", "int8", "int4 g32"):
        packed, x = FORMS[form](torch.randn(300, 32)), torch.randn(3, 32)
        fine = drawn(library, packed, x, [ask(), ask(), ask()])
        for bad in (torch.nan, torch.inf, -torch.inf):
            x[1, 3] = bad
            assert drawn(library, packed, x, [ask(), ask(), ask()]) == [fine[0], -1, fine[2]], (form, bad)
        x[1] = 0
        nothing = ask(allowed=lambda n: np.zeros(n, bool))
        for spec in (nothing, ask(allowed=lambda n: np.zeros(n, bool), temperature=1.0, top_p=0.5)):
            assert drawn(library, packed, x, [ask(), spec, ask()])[1] == -1


def ties_take_the_first_token(library: ctypes.CDLL) -> None:
    """Across panels and what else a vocabulary is cut into, and within one."""
    for likely in ([70, 130, 199], [69, 105], [3, 40], [199], [1000, 1100, 2299]):
        weight = torch.zeros(max(200, likely[-1] + 1), 8)
        weight[likely] = 1
        assert drawn(library, pack_f32(weight), torch.ones(1, 8), [ask()]) == likely[:1]


def penalties_are_of_what_was_said(library: ctypes.CDLL) -> None:
    """Presence and frequency count outputs alone, each time; repetition counts the prompt too, once."""
    logits = torch.full((90, 1), -5.0)
    logits[[5, 6, 7, 80], 0] = torch.tensor([2.0, 2.5, 1.9, 1.5])
    packed, x, history = pack_f32(logits), torch.ones(1, 1), [5, 6, 6, 80]
    for fields, likeliest in (
        ({"frequency_penalty": 0.3, "presence_penalty": 0.2}, 5),
        ({"frequency_penalty": 0.3}, 5),
        ({"frequency_penalty": 0.2}, 6),
        ({"presence_penalty": 0.2}, 6),
        ({"repetition_penalty": 1.2}, 6),
        ({"repetition_penalty": 1.4}, 7),
    ):
        spec = ask(history=history, prompt=1, **fields)
        assert drawn(library, packed, x, [spec]) == drawn(library, packed, x, [spec]) == [likeliest], fields


def a_call_remembers_nothing_of_the_last(library: ctypes.CDLL) -> None:
    """Tokens that were counted for one call's penalties weigh nothing in the next one's."""
    logits = torch.full((90, 1), -5.0)
    logits[[5, 6], 0] = torch.tensor([2.0, 1.5])
    packed, x = pack_f32(logits), torch.ones(1, 1)
    for said, likeliest in (([1, 5], 6), ([1, 7], 5), ([1, 5, 5], 6), ([1, 7], 5)):
        spec = ask(history=said, prompt=1, frequency_penalty=1.0)
        assert drawn(library, packed, x, [spec]) == [likeliest], said


def filters_come_one_behind_the_other(library: ctypes.CDLL) -> None:
    """top_p of what top_k left, min_p of the likeliest: among tokens that are all about as likely."""
    torch.manual_seed(8)
    packed, x = pack_f32(torch.randn(100, 8) * 0.01), torch.randn(1, 8).expand(24, 8).contiguous()
    specs = [ask(temperature=1.0, seed=seed, top_k=10, top_p=0.5, min_p=0.01) for seed in range(24)]
    logits = logits_of(library, packed, x)
    wanted = [found.token_id for found in choose(logits.clone(), range(24), specs, sample)]
    assert drawn(library, packed, x, specs) == wanted
    assert set(wanted) <= set(logits[0].topk(5).indices.tolist())


def a_wide_nucleus_is_found(library: ctypes.CDLL, vocab: int = 2600) -> None:
    """Flat rows, where more tokens are likely than a kernel may look at first."""
    torch.manual_seed(3)
    packed, x = pack_f32(torch.randn(vocab, 8) * 0.05), torch.randn(6, 8)
    fields: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": vocab - 100}, {"top_k": 2300, "top_p": 0.99}]
    specs = [ask(temperature=1.0, seed=seed, **draw) for draw in fields for seed in range(2)]
    logits = logits_of(library, packed, x)
    wanted = [found.token_id for found in choose(logits, range(len(specs)), specs, sample)]
    assert drawn(library, packed, x, specs) == wanted


def frequencies_follow_the_softmax(library: ctypes.CDLL, fields: dict[str, Any], draws: int, batch: int) -> None:
    """Chi-square over ``draws`` draws of 100 tokens, ``batch`` rows a call."""
    torch.manual_seed(4)
    packed, x = pack_f32(torch.randn(100, 8)), torch.randn(1, 8)
    logits = logits_of(library, packed, x)[0].double()
    probs = logits.softmax(-1)
    if "top_k" in fields:
        probs[logits < logits.topk(20).values[-1]] = 0
    if "top_p" in fields:
        falling, order = probs.sort(descending=True)
        probs[order[falling.cumsum(0) - falling >= 0.8]] = 0
    if "min_p" in fields:
        probs[probs < 0.1 * probs.max()] = 0
    probs /= probs.sum()
    counts, many = torch.zeros(100, dtype=torch.int64), x.expand(batch, 8).contiguous()
    for first in range(0, draws, batch):
        specs = [ask(temperature=1.0, seed=first + row, **fields) for row in range(batch)]
        counts += torch.bincount(torch.tensor(drawn(library, packed, many, specs)), minlength=100)
    chi_square(counts, probs)


def chi_square(counts: Tensor, probs: Tensor) -> None:
    """Asserts that ``counts`` may come from ``probs``: within five standard deviations of chi-square's mean."""
    draws = int(counts.sum())
    assert bool((counts[probs == 0] == 0).all())
    likely = probs * draws >= 5
    expected = probs[likely] * draws
    chi = float(((counts[likely] - expected).square() / expected).sum())
    freedom = int(likely.sum()) - 1
    assert chi < freedom + 5 * math.sqrt(2 * freedom), (chi, freedom)


def what_is_beside_comes_before_all_else(library: ctypes.CDLL) -> None:
    """Numbers added to the products are part of the logits that go out, and of those that every draw is of; a GPU's
    alone.
    """
    torch.manual_seed(6)
    for form, vocab in (("float32", 71), ("bf16", 200), ("int4 row", 65)):
        specs = asked(vocab, 1)
        packed, x = FORMS[form](torch.randn(vocab, 40)), torch.randn(len(specs), 40) * 0.5
        beside = torch.randn(len(specs), vocab)
        logits = _beside(library, packed, x, beside, None)
        assert torch.equal(logits, logits_of(library, packed, x) + beside)
        wanted = [found.token_id for found in choose(logits.clone(), range(len(specs)), specs, sample)]
        found = _beside(library, packed, x, beside, specs).tolist()
        wrong = [(row, a, b) for row, (a, b) in enumerate(zip(found, wanted, strict=True)) if a != b]
        assert len(wrong) <= len(specs) // 50, (form, wrong)
        plain = [found.token_id for found in choose(logits - beside, range(len(specs)), specs, sample)]
        assert wanted != plain


def _beside(
    library: ctypes.CDLL, weight: PackedWeight, x: Tensor, beside: Tensor, specs: list[SampleSpec] | None
) -> Tensor:
    """The tokens of ``specs``; without any, all rows' logits."""
    choices, logits, kept = np.zeros(len(x), CHOICE), torch.full((len(x), weight.n), torch.nan), []
    for row in range(len(x)):
        kept += fill(choices[row], ask() if specs is None else specs[row], weight.n)
        choices[row]["logits"] = logits[row].data_ptr() if specs is None else 0
    call = declare(library, "lm_head_beside", P, P, I64, I32, P, P)
    call(weight.address, x.data_ptr(), x.stride(0), len(x), beside.data_ptr(), choices.ctypes.data)
    return logits if specs is None else torch.tensor(choices["token"].astype(np.int64))


Check = Callable[[ctypes.CDLL], None]
QUICK: tuple[Check, ...] = (
    logits_may_be_asked_for_beside_choices,
    rows_without_a_finite_logit_are_said,
    ties_take_the_first_token,
    penalties_are_of_what_was_said,
    a_call_remembers_nothing_of_the_last,
    filters_come_one_behind_the_other,
    a_wide_nucleus_is_found,
)
