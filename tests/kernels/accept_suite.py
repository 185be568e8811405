"""Checks what holds of baton_speculative_accept, whichever library it is in; each check takes the library.

The oracle is the reference, in float64; that the tokens' distribution is the target's is shown by chi-square.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable

import torch
from torch import Tensor

from baton.kernels.abi.native import declare
from baton.kernels.speculative_accept import cpu
from baton.kernels.speculative_accept.reference import MOST, Rejection, speculative_accept
from tests.kernels.head_suite import chi_square

Sequence = tuple[Tensor, Tensor | Rejection]
# The largest share of cases in which rounding may decide: where a number falls onto an edge.
EDGES = 1 / 200


def accepted(library: ctypes.CDLL, sequences: list[Sequence]) -> list[tuple[Tensor, int]]:
    """Returns, per sequence, the emitted tokens and how many drafts were accepted."""
    return cpu.run(declare(library, "speculative_accept", *cpu.ARGUMENTS), sequences)


def rejection(rng: random.Random, vocab: int, count: int, temperature: float, certain: bool) -> Sequence:
    """Rows that are likely to agree: the drafter's logits are near the target's, its tokens drawn from them."""
    target = torch.randn(count + 1, vocab + 3)[:, :vocab] * 2
    proposed = (target[:count] + torch.randn(count, vocab) * 0.7).div(temperature or 1).softmax(-1)
    tokens = torch.multinomial(proposed, 1)[:, 0] if count else torch.zeros(0, dtype=torch.int64)
    if certain:
        tokens = torch.where(torch.rand(count) < 0.7, target[:count].argmax(-1), tokens)
    uniform = torch.tensor([rng.random() for _ in range(2 * count + 1)], dtype=torch.float64)
    return tokens, Rejection(target, None if certain else proposed, uniform[:count], uniform[count:], temperature)


def said(sequence: Sequence, emitted: Tensor, stand: int) -> tuple[int, int]:
    """Returns how many drafts were accepted and the token behind them, after checking the rest of ``emitted``."""
    assert emitted[:stand].tolist() == sequence[0][:stand].tolist()
    assert bool((emitted[stand + 1 :] == -1).all())
    return stand, int(emitted[stand])


def it_is_the_references(library: ctypes.CDLL, vocabs: tuple[int, ...], cases: int) -> None:
    """Compares ragged batches with the reference: every count, with and without the drafter's probabilities, warm,
    hot and greedy.
    """
    rng, wrong = random.Random(2), 0
    torch.manual_seed(2)
    for vocab in vocabs:
        sequences = [
            rejection(rng, vocab, case % 9, (1.0, 0.4, 2.5, 0.0)[case % 4], case % 3 == 0) for case in range(cases)
        ]
        for sequence, found in zip(sequences, accepted(library, sequences), strict=True):
            wrong += said(sequence, *found) != speculative_accept(*sequence)
    assert wrong <= EDGES * cases * len(vocabs), wrong


def choices_are_matched(library: ctypes.CDLL) -> None:
    """Drafts stand as far as the target chose the same, wherever its choices lie; -1 matches nothing."""
    rows = torch.tensor([[5, 0], [7, 0], [9, 0], [-1, 0]], dtype=torch.int32)  # choices with a stride
    for drafted, stand, token in (
        ([5, 7, 9], 3, -1),
        ([5, 7], 2, 9),
        ([5, 8, 9], 1, 7),
        ([4, 7, 9], 0, 5),
        ([-1], 0, 5),
        ([5, 7, -1], 2, 9),
        ([], 0, 5),
    ):
        sequence = torch.tensor(drafted, dtype=torch.int64), rows[: len(drafted) + 1, 0]
        assert said(sequence, *accepted(library, [sequence])[0]) == (stand, token)
        assert speculative_accept(*sequence) == (stand, token)


def what_is_beyond_the_most_is_left_out(library: ctypes.CDLL) -> None:
    """Of seventeen good drafts sixteen are accepted, and the target's own token follows them."""
    tokens = torch.arange(MOST + 3)
    [found] = accepted(library, [(tokens, torch.arange(MOST + 4))])
    assert said((tokens, tokens), *found) == (MOST, MOST)
    target = torch.full((MOST + 4, 50), -5.0)
    target[torch.arange(MOST + 4), torch.arange(MOST + 4)] = 5.0
    numbers = torch.full((MOST + 4,), 0.5, dtype=torch.float64)
    sequence: Sequence = (tokens, Rejection(target, None, numbers, numbers, 0.0))
    assert said(sequence, *accepted(library, [sequence])[0]) == speculative_accept(*sequence) == (MOST, MOST)


def bad_rows_end_it_there(library: ctypes.CDLL) -> None:
    """A row with a NaN, or nothing to choose from, emits -1 in its place; other sequences don't notice."""
    rng = random.Random(4)
    torch.manual_seed(4)
    for temperature in (1.0, 0.0):
        good = rejection(rng, 90, 3, temperature, True)
        for bad in (torch.nan, torch.inf, -torch.inf):
            tokens, by = rejection(rng, 90, 3, temperature, True)
            assert isinstance(by, Rejection)
            by = by._replace(target=by.target.clone(), accept=torch.zeros(3, dtype=torch.float64))
            tokens[:2] = by.target[:2].argmax(-1)
            by.target[2] = bad if bad < 0 else by.target[2]
            by.target[2, 40] = bad
            found = accepted(library, [good, (tokens, by), good])
            assert said((tokens, by), *found[1]) == (2, -1) == speculative_accept(tokens, by)
            assert said(good, *found[0]) == said(good, *found[2]) == speculative_accept(*good)


def drafts_outside_of_the_vocabulary_fall(library: ctypes.CDLL) -> None:
    """Such drafts have no probability, so the target's own token comes instead."""
    rng = random.Random(6)
    torch.manual_seed(6)
    for token in (-1, 70, 2**31 - 1):
        _, by = rejection(rng, 70, 1, 1.0, True)
        sequence = torch.tensor([token]), by
        assert said(sequence, *accepted(library, [sequence])[0])[0] == 0


def hidden_tokens_never_come(library: ctypes.CDLL) -> None:
    """Logits of -inf have no mass, as drafts or behind them; the last number below 1 names one that has."""
    target = torch.full((2, 130), -torch.inf)
    target[:, [3, 100]] = 1.0
    for number in (0.0, 0.3, 0.7, 1 - 2**-53):
        numbers = torch.full((2,), number, dtype=torch.float64)
        for token, proposed in ((50, None), (3, None), (50, torch.full((1, 130), 1 / 130))):
            sequence = torch.tensor([token]), Rejection(target, proposed, numbers[:1], numbers, 1.0)
            stand, behind = said(sequence, *accepted(library, [sequence])[0])
            assert (stand, behind) == speculative_accept(*sequence)
            assert behind in (3, 100)
            assert stand <= (token == 3)


def tokens_follow_the_target(library: ctypes.CDLL, draws: int, batch: int, certain: bool) -> None:
    """Chi-square of both places over ``draws`` sequences of two drafts that follow another distribution."""
    torch.manual_seed(9)
    vocab = 40
    target = torch.randn(3, vocab) * 1.5
    proposed = (target[:2] + torch.randn(2, vocab)).softmax(-1)
    counts = torch.zeros(2, vocab, dtype=torch.int64)
    for _ in range(0, draws, batch):
        drafted = target[:2].argmax(-1).expand(batch, 2) if certain else torch.multinomial(proposed, batch, True).T
        numbers = torch.rand(batch, 5, dtype=torch.float64)
        sequences: list[Sequence] = [
            (drafted[i], Rejection(target, None if certain else proposed, numbers[i, :2], numbers[i, 2:], 0.8))
            for i in range(batch)
        ]
        for emitted, stand in accepted(library, sequences):
            for place in range(min(stand + 1, 2)):
                counts[place, emitted[place]] += 1
    for place in range(2):
        chi_square(counts[place], (target[place].double() / 0.8).softmax(-1))


Check = Callable[[ctypes.CDLL], None]
QUICK: tuple[Check, ...] = (
    choices_are_matched,
    what_is_beyond_the_most_is_left_out,
    bad_rows_end_it_there,
    drafts_outside_of_the_vocabulary_fall,
    hidden_tokens_never_come,
)
