"""A decode worker in virtual time: the real drafter over scripted answers, on a machine whose step times are a
formula.

Knows nothing of models. Answers follow one another in each of a batch's places, as clients' do.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from baton.engine.speculate.draft import Draft, SequenceView, Speculator
from baton.engine.speculate.drafter import Drafter
from bench import speculation_texts as texts
from bench.speculation_texts import PROMPT, VOCAB
from tests.engine.speculate.texts import Written

ANSWER = 160  # tokens
AHEAD = 20  # tokens behind an answer, which drafts may run ahead to
CALL_S = 20e-6  # seconds that a speculator takes for a draft
Machine = Callable[[int], float]  # seconds of a step by its rows
Text = Callable[[list[int], random.Random], list[int]]  # the answer to a prompt
new, copied, misleading = (
    partial(kind, length=ANSWER + AHEAD) for kind in (texts.new, texts.copied, texts.misleading)
)


def flat(rows: int) -> float:
    """Up to eight rows for the price of one, then more for each: a machine that waits for its memory."""
    return 8e-3 * (1 + 0.08 * max(0, rows - 8))


def sloped(rows: int) -> float:
    """Each row costs: a machine that computes as fast as it reads."""
    return 8e-3 * (0.85 + 0.15 * rows)


def stairs(rows: int) -> float:
    """One or two rows at once, or four at once for twice as much."""
    return 8e-3 * (1 if rows == 1 else 1.28 if rows == 2 else 2 * (-(-rows // 4)) ** 0.9)


def quick(rows: int) -> float:
    """Each row costs a little of a short step, in which calls for drafts are felt."""
    return 2e-3 * (0.91 + 0.09 * rows)


def gentle(rows: int) -> float:
    """Twice as many rows as eight take 28% longer."""
    return 4e-3 * (0.72 + 0.28 * rows / 8)


def steep(rows: int, speed: float = 1.0) -> float:
    """Up to four rows for the price of one, then a fifth of that for each; ``speed`` is a factor."""
    return speed * 1e-3 * (10 + 2 * max(0, rows - 4))


class Clock:
    """Counts the seconds that the world has played so far."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Costly(Speculator):
    """A speculator whose calls take virtual time; those right behind another one take ``again`` of it."""

    def __init__(self, inner: Speculator, clock: Clock, call_s: float = CALL_S, again: float = 1.0) -> None:
        self.name, self._inner, self._clock, self._call_s = inner.name, inner, clock, call_s
        self._again, self._last = again, -1.0

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        is_again = self._last == self._clock.now
        self._clock.now += self._call_s * (self._again if is_again else 1.0)
        self._last = self._clock.now
        self._inner.branches = self.branches
        return self._inner.propose(text, budget)

    def end(self, text: SequenceView) -> None:
        self._inner.end(text)


class Known(Speculator):
    """Proposes what will be written, each token right by ``chance``: ``text`` is the kind of text to play."""

    name = "known"

    def __init__(self, chance: float, seed: int = 0) -> None:
        self._chance, self._rng = chance, random.Random(seed)
        self._answers: list[list[int]] = []

    def text(self, prompt: list[int], rng: random.Random) -> list[int]:
        """Returns an answer that repeats nothing; its number is that of the sequence."""
        self._answers.append(new(prompt, rng))
        return self._answers[-1]

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        coming = self._answers[text.seq - 1][text.outputs : text.outputs + budget]
        return Draft([t if self._rng.random() < self._chance else t ^ 1 for t in coming], self.name, 0)

    def end(self, text: SequenceView) -> None:
        """Does nothing, because nothing is remembered."""


class Played(NamedTuple):
    """Holds what was played: each step's seconds over those without drafts, answers' p99s, and tokens per second
    over those without."""

    steps: list[float]
    clients: dict[Text, list[float]]  # by kind of text: each answer's 99th percentile of steps
    rate: float
    drafted: int  # steps with drafts


def p99(values: Sequence[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


def wrote(drafter: Drafter, text: Written, draft: Draft | None, coming: Sequence[int]) -> int:
    """Lets a step write what is ``coming`` after ``text``, one token and the drafts that stand; returns their
    number.
    """
    stood = 0
    if draft is not None:
        chosen = [coming[0], *(coming[min(len(path), len(coming) - 1)] for path in draft.paths())]
        rows = draft.stands(chosen)
        stood = len(rows) - 1
        drafter.judge(text, draft, stood, chosen, rows)
    text.tokens += coming[: stood + 1]
    return stood


def numbered() -> Iterator[int]:
    number = 0
    while True:
        yield (number := number + 1)


def play(
    drafter: Drafter,
    clock: Clock,
    machine: Machine,
    kinds: Sequence[Text],
    batch: int,
    steps: int,
    seed: int = 0,
    noise: float = 0.0,
    warm: int = 0,
) -> Played:
    """Plays ``steps`` steps of ``batch`` answers at once; kinds of texts take turns. The rate is of those behind
    the first ``warm``.
    """
    rng, numbers, none = random.Random(seed), numbered(), machine(batch)

    def begun() -> tuple[Written, list[int], list[float], Text]:
        prompt = [rng.randrange(VOCAB) for _ in range(PROMPT)]
        number = next(numbers)
        kind = kinds[number % len(kinds)]
        answer = kind(prompt, rng)
        return Written(number, [*prompt, answer[0]], PROMPT), answer, [], kind

    lives = [begun() for _ in range(batch)]
    for text, answer, _, _ in lives:  # half way, each at another place
        text.tokens += answer[1 : rng.randrange(1, ANSWER // 2)]
    took, clients = list[float](), dict[Text, list[float]]()
    tokens, drafted, start = 0, 0, clock.now
    for step in range(steps):
        began = clock.now
        if step == warm:
            tokens, start = 0, began
        for text, *_ in lives:
            text.draft_room = max(0, ANSWER - text.outputs - 1)
        drafts = drafter.plan([text for text, *_ in lives])
        rows = batch + sum(len(draft.tokens) for draft in drafts.values())
        seconds = machine(rows) * rng.uniform(1 - noise, 1 + noise)
        clock.now += seconds
        drafter.observe(rows, 0, seconds)
        drafted += bool(drafts)
        took.append((clock.now - began) / none)
        for place, (text, answer, gaps, kind) in enumerate(lives):
            gaps.append(took[-1])
            stood = wrote(drafter, text, drafts.get(text.seq), answer[text.outputs :])
            tokens += stood + 1
            if text.outputs >= ANSWER:
                drafter.end(text)
                clients.setdefault(kind, []).append(p99(gaps))
                lives[place] = begun()
    return Played(took, clients, tokens / (clock.now - start) / (batch / none), drafted)
