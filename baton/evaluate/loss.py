"""Loss on a text in bits per byte, and how much a subject's exceeds a reference's. Torch-free.

Knows nothing of models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from baton.evaluate.figures import Figure
from baton.evaluate.intervals import ratio_interval
from baton.evaluate.subject import Subject
from baton.evaluate.text import Document

LN2 = math.log(2)


def bits(subject: Subject, documents: Sequence[Document]) -> list[float]:
    """Returns the negative log-likelihood of each document under the subject, in bits."""
    scored = subject.scores([window for document in documents for window in document.windows])
    return [-sum(token.logprob for _ in document.windows for token in next(scored)) / LN2 for document in documents]


def loss_figures(
    documents: Sequence[Document], found: Sequence[float], reference: Sequence[float] | None
) -> Iterator[Figure]:
    """Yields the loss in bits per byte; with ``reference`` (bits by document), also its loss and the added
    share.
    """
    sizes = [float(document.bytes) for document in documents]
    yield _per_byte("loss", found, sizes)
    if reference is None:
        return
    yield _per_byte("loss of the reference", reference, sizes)
    low, high = ratio_interval(found, reference)
    added = sum(found) / sum(reference) - 1
    yield Figure("added loss", added, "share", low - 1, high - 1, len(documents), "loss")


def _per_byte(name: str, found: Sequence[float], sizes: Sequence[float]) -> Figure:
    return Figure(name, sum(found) / sum(sizes), "bits/byte", *ratio_interval(found, sizes), len(sizes))
