"""Measures how closely a subject follows a reference's own greedy answers. Torch-free.

Knows nothing of models. Both score the reference's answers, which says for each token what they would have chosen;
and the subject answers the same prompts itself, with its decoding, handoff and cache as they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from baton.evaluate.figures import Figure
from baton.evaluate.intervals import mean_interval, ratio_interval, share_interval
from baton.evaluate.subject import TOP, Continuation, Ids, Subject, TokenKey, TokenScore

FLOOR = 1e-12  # of a probability: what rounding leaves of nothing


class GreedyAnswer(NamedTuple):
    """A prompt, the reference's greedy answer to it, and that answer's token ids."""

    prompt: tuple[int, ...]
    answer: Continuation
    ids: tuple[int, ...]


def opening_prompts(documents: Sequence[Ids], prompts: int, tokens: int) -> list[tuple[int, ...]]:
    """Returns the first ``tokens`` tokens of ``prompts`` documents, spread evenly over all."""
    long = [document for document in documents if len(document) > 1]
    step = max(1, len(long) // prompts)
    return [tuple(document[:tokens]) for document in long[::step][:prompts]]


def greedy_answers(reference: Subject, prompts: Sequence[tuple[int, ...]], tokens: int) -> list[GreedyAnswer]:
    """Returns the reference's greedy answers of ``tokens`` tokens each; empty answers are left out."""
    answers = reference.answers(prompts, tokens, to_the_end=True)
    ids = [answer.ids or tuple(reference.encode(answer.text)) for answer in answers]
    return [GreedyAnswer(p, a, i) for p, a, i in zip(prompts, answers, ids, strict=True) if i]


def path_figures(subject: Subject, reference: Subject, paths: Sequence[GreedyAnswer]) -> Iterator[Figure]:
    """Yields the KL divergence, the share of tokens that disagree, and how far the subject's own answers match the
    reference's.
    """
    whole = [path.prompt + path.ids for path in paths]
    known = [s[-len(p.ids) :] for s, p in zip(reference.scores(whole, TOP), paths, strict=True)]
    found = [s[-len(p.ids) :] for s, p in zip(subject.scores(whole, TOP), paths, strict=True)]
    pairs = [
        list(zip(_named(k, reference, f), _named(f, subject, k), strict=True))
        for k, f in zip(known, found, strict=True)
    ]
    yield from _read(pairs)
    longest = max(len(path.ids) for path in paths)
    own = subject.answers([path.prompt for path in paths], longest, to_the_end=True)
    yield from _spoken([path.answer for path in paths], own, reference, subject)


def _read(pairs: Sequence[Sequence[tuple[TokenScore, TokenScore]]]) -> Iterator[Figure]:
    counts = [float(len(pair)) for pair in pairs]
    tokens = int(sum(counts))
    apart = [sum(divergence(k.top, f.top) for k, f in pair) for pair in pairs]
    yield Figure("KL", sum(apart) / tokens, "nats/token", *ratio_interval(apart, counts), tokens, "kl")
    missed = [float(sum(k.best != f.best for k, f in pair)) for pair in pairs]
    interval = ratio_interval(missed, counts)
    yield Figure("another likeliest token", sum(missed) / tokens, "share", *interval, tokens, "disagreement")


def _spoken(
    known: Sequence[Continuation], own: Sequence[Continuation], reference: Subject, subject: Subject
) -> Iterator[Figure]:
    texts = any(answer.ids is None for answer in (*known, *own))
    both = [(_keys(k, reference, texts), _keys(o, subject, texts)) for k, o in zip(known, own, strict=True)]
    agreed = [agreeing_tokens(k, o) for k, o in both]
    changed = sum(k != o[: len(k)] for k, o in both)
    count = len(both)
    interval = share_interval(changed, count)
    yield Figure("answers that change", changed / count, "share", *interval, count, "divergence")
    mean = sum(agreed) / count
    yield Figure("tokens before the first that differs", mean, "tokens", *mean_interval(agreed), count)
    moves = [
        [abs(a - b) for a, b in zip(k.logprobs[:n], o.logprobs[:n], strict=False)]
        for k, o, n in zip(known, own, agreed, strict=True)
    ]
    sums, lengths = [sum(m) for m in moves], [float(len(m)) for m in moves]
    if any(lengths):
        moved = sum(sums) / sum(lengths)
        interval = ratio_interval(sums, lengths)
        yield Figure("change of log p until then", moved, "nats/token", *interval, int(sum(lengths)))


def divergence(known: Mapping[TokenKey, float], found: Mapping[TokenKey, float]) -> float:
    """Returns KL(known || found) in nats, over the tokens that both name and all others merged into one outcome.

    Values are log probabilities in nats. Merging outcomes never increases the divergence, so this is a lower bound
    of the full vocabulary's; with the twenty likeliest tokens of each it is close.
    """
    shared = [key for key in known if key in found]
    terms = [math.exp(known[key]) * (known[key] - found[key]) for key in shared]
    rest_known = max(1 - sum(math.exp(known[key]) for key in shared), FLOOR)
    rest_found = max(1 - sum(math.exp(found[key]) for key in shared), FLOOR)
    return max(0.0, sum(terms) + rest_known * math.log(rest_known / rest_found))


def agreeing_tokens(known: Sequence[TokenKey], own: Sequence[TokenKey]) -> int:
    """Returns the number of leading tokens that are the same."""
    return next(
        (at for at, (a, b) in enumerate(zip(known, own, strict=False)) if a != b), min(len(known), len(own))
    )


def _named(scored: Sequence[TokenScore], by: Subject, other: Sequence[TokenScore]) -> list[TokenScore]:
    """Returns ``scored`` with texts in place of ids if ``other`` names its tokens by text."""
    if not any(isinstance(key, str) for token in other for key in token.top):
        return list(scored)
    return [TokenScore(token.logprob, _by_text(token.top, by)) for token in scored]


def _by_text(top: Mapping[TokenKey, float], by: Subject) -> dict[TokenKey, float]:
    """Returns log probabilities by text; of tokens with the same text the likeliest counts."""
    return {_text(key, by): top[key] for key in sorted(top, key=lambda key: top[key])}


def _keys(answer: Continuation, by: Subject, texts: bool) -> tuple[TokenKey, ...]:
    return tuple(_text(token, by) for token in answer.tokens) if texts else answer.tokens


def _text(key: TokenKey, by: Subject) -> str:
    return key if isinstance(key, str) else by.token_text(key)
