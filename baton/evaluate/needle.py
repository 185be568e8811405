"""Measures whether a model finds a fact in a long context, by depth and length. Torch-free.

Knows nothing of models. The haystack is the evaluation's text; the needle is a sentence with a number of five
digits, and the prompt ends where that number is due again. Each needle is also scored: the likelihood of its
number, in nats, changes long before a small model finds or loses it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from baton.evaluate.figures import Figure
from baton.evaluate.intervals import mean_interval, ratio_interval, share_interval
from baton.evaluate.subject import Subject

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)  # shares of the text that stand before a needle
NEEDLE = "The secret number of {name} is {number}."
QUESTION = "The secret number of {name} is"
NAMES = ("the lighthouse", "the old miller", "the grey horse", "the north gate", "the quiet harbour")
EACH = 3  # needles for each depth and length
ROOM = 64  # tokens kept free for needle, question and number
DIGITS = 10  # tokens that a number of five digits takes at most


class Needle(NamedTuple):
    """A prompt that hides a fact in a text and ends with the question for it."""

    prompt: tuple[int, ...]
    number: str  # expected answer
    answer: tuple[int, ...]  # tokens of the expected answer
    length: int  # nominal tokens of the prompt
    depth: float  # of the fact in the text, from 0 (start) to 1 (end)


class NeedleResult(NamedTuple):
    """A subject's result for one needle."""

    hit: bool  # whether it wrote the number
    nats: float  # negative log-likelihood of the whole number


def needles(subject: Subject, hay: Sequence[str], lengths: Sequence[int], seed: int = 0) -> list[Needle]:
    """Returns ``EACH`` needles for each of ``DEPTHS`` and each of ``lengths`` that fits the context, drawn with
    ``seed``.
    """
    rng = random.Random(seed)
    sentences = [sentence for text in hay for sentence in text.split("\n") if sentence.strip()]
    fitting = [length for length in lengths if length <= subject.context]
    return [
        _needle(subject, sentences, length, depth, rng)
        for length in fitting
        for depth in DEPTHS
        for _ in range(EACH)
    ]


def _needle(subject: Subject, sentences: Sequence[str], length: int, depth: float, rng: random.Random) -> Needle:
    name, number = rng.choice(NAMES), str(rng.randrange(10_000, 100_000))
    hay = _haystack(subject, sentences, length - ROOM, rng)
    hay.insert(round(depth * len(hay)), NEEDLE.format(name=name, number=number))
    prompt = subject.encode("\n".join([*hay, QUESTION.format(name=name)]))
    whole = subject.encode("\n".join([*hay, QUESTION.format(name=name) + f" {number}"]))
    shared = next((i for i, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
    return Needle(tuple(whole[:shared]), number, tuple(whole[shared:]), length, depth)


def _haystack(subject: Subject, sentences: Sequence[str], tokens: int, rng: random.Random) -> list[str]:
    """Returns consecutive sentences from a random place on, of at most ``tokens`` tokens."""
    at, found, room = rng.randrange(len(sentences)), [], tokens
    while (size := len(subject.encode(sentences[at % len(sentences)])) + 1) <= room:
        found.append(sentences[at % len(sentences)])
        at, room = at + 1, room - size
    return found


def answer_needles(subject: Subject, asked: Sequence[Needle]) -> list[NeedleResult]:
    """Returns the subject's result for each needle."""
    texts = [answer.text for answer in subject.answers([one.prompt for one in asked], DIGITS)]
    scored = subject.scores([one.prompt + one.answer for one in asked])
    nats = [
        -sum(token.logprob for token in found[-len(one.answer) :]) for one, found in zip(asked, scored, strict=True)
    ]
    return [
        NeedleResult(text.strip().startswith(one.number), n)
        for one, text, n in zip(asked, texts, nats, strict=True)
    ]


def needle_figures(
    asked: Sequence[Needle], found: Sequence[NeedleResult], reference: Sequence[NeedleResult] | None
) -> Iterator[Figure]:
    """Yields the share of needles found, in total and by depth, and the mean nats of a number.

    With ``reference``, also its share, the share lost and the added nats.
    """
    yield _hits("needles found", found)
    for depth in sorted({one.depth for one in asked}):
        yield _hits(
            f"needles found at depth {depth:.0%}",
            [f for f, one in zip(found, asked, strict=True) if one.depth == depth],
        )
    nats = [one.nats for one in found]
    yield Figure("needle's number", sum(nats) / len(nats), "nats", *mean_interval(nats), len(nats))
    if reference is None:
        return
    yield _hits("needles found by the reference", reference)
    lost = [float(r.hit) - float(f.hit) for r, f in zip(reference, found, strict=True)]
    yield Figure("needles lost", sum(lost) / len(lost), "share", *mean_interval(lost), len(lost), "needle")
    known = [one.nats for one in reference]
    low, high = ratio_interval(nats, known)
    yield Figure("needle's number, added", sum(nats) / sum(known) - 1, "share", low - 1, high - 1, len(nats))


def _hits(name: str, found: Sequence[NeedleResult]) -> Figure:
    hits = sum(one.hit for one in found)
    return Figure(name, hits / len(found), "share", *share_interval(hits, len(found)), len(found))
