"""Learns how soon cached pages are reused, and from that the value of keeping a page. Torch-free.

Knows nothing of pages or hashes: it counts pages by *class* and by *age*. Age is measured as the number of pages
handed out since a page joined the cache, which is how long an eviction policy has to keep it; no clock is read.

Per class it counts, in half-octaves of age, the pages that were used again, those that reached an age of
``HORIZON`` pools unused, and those still observed (in the cache, or evicted and remembered). The share of pages
which reached an age that were used in it is a hazard rate (Kaplan and Meier 1958), shrunk towards that of the wider
class if few were observed. A page's worth is its Gittins index (Gittins 1979): the maximum, over all ages until
which it could be kept, of uses per page and time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BINS = 56  # half-octaves of age, up to 2^28 pages
EPOCHS = 128  # in HORIZON pools: the resolution of the ages of pages still observed
HORIZON = 8  # pools: a page that isn't used within so many pools' pages counts as never used again
TRUST = 64.0  # observed pages that weigh as much as the wider class does
PRIOR = 0.1  # assumed hazard rate per half-octave; as in LRU, old pages are used least
# Uses and turns that are told apart, and kinds of gaps: few, so that each is met often.
MOST_USES, MOST_TURNS, GAPS = 3, 4, 3
HINT = 1.5  # factor by which hinted pages are assumed to be used more often until it is learned
FORGET = 32  # pools of observed pages after which the weight of earlier observations is halved

Floats = NDArray[np.float64]


class PageHistory(NamedTuple):
    """The earlier uses of a page, when it joins the cache."""

    uses: int = 0  # how often it was found in the cache
    turns: int = 0  # how often the deepest used block of its chain was found
    gap: int = 0  # pages handed out between the chain's last two uses
    hinted: bool = False  # whether a client said that it will be used again


class ReuseTable:
    """Counts reuse of the pages of a pool of ``pages`` pages by class, a number below ``CLASSES``. Times are pages
    handed out so far.
    """

    def __init__(self, pages: int) -> None:
        self._epoch = max(1, pages * HORIZON // EPOCHS)
        self._near = max(1, pages // 4), max(2, pages)
        self._forget = FORGET * max(64, pages)
        self._used, self._unused = np.zeros((CLASSES, BINS)), np.zeros((CLASSES, BINS))
        self._coming = np.zeros((CLASSES, EPOCHS))
        self._now, self._seen = 0, 0.0
        self.horizon = self._epoch * EPOCHS

    def class_of(self, kind: PageHistory) -> int:
        """Returns the class of pages with history ``kind``."""
        gap = sum(kind.gap > edge for edge in self._near)
        history = (min(kind.uses, MOST_USES) * (MOST_TURNS + 1) + min(kind.turns, MOST_TURNS)) * GAPS + gap
        return 2 * history + kind.hinted

    def joined(self, cls: int, at: int, pages: float) -> None:
        """Counts ``pages`` pages of class ``cls`` whose observation begins at time ``at``."""
        self._advance(at)
        if at // self._epoch > self._now - EPOCHS:
            self._coming[cls, at // self._epoch % EPOCHS] += pages

    def left(self, cls: int, at: int, pages: float) -> None:
        """Ends the observation of ``pages`` pages of class ``cls`` that joined at time ``at``, used or not."""
        if at // self._epoch > self._now - EPOCHS:
            self._coming[cls, at // self._epoch % EPOCHS] -= pages

    def lost(self, cls: int, at: int, now: int, pages: float) -> None:
        """Counts ``pages`` pages that joined at time ``at`` and were not used until ``now``, when their observation
        ends.
        """
        if at // self._epoch > self._now - EPOCHS:
            self.left(cls, at, pages)
            self._unused[cls, bin_of(now - at)] += pages

    def used(self, cls: int, at: int, now: int, pages: float = 1.0) -> None:
        """Counts ``pages`` pages that joined at time ``at`` and are used again at ``now``."""
        if now - at < self.horizon:
            self.left(cls, at, pages)
            self._used[cls, bin_of(now - at)] += pages
            self._weigh(pages)

    def worth(self, now: int, classes: Sequence[int]) -> Floats:
        """Returns the Gittins index, uses per page and page handed out, of each of ``classes`` by age: float64
        (classes, BINS).
        """
        self._advance(now)
        watched = bin_of(self.horizon) + 1
        found = gittins(self._hazard(self._risk(now))[classes, :watched])
        return np.pad(found, ((0, 0), (0, BINS - watched)), mode="edge")

    def _risk(self, now: int) -> Floats:
        """Returns the pages that reached each age, (CLASSES, BINS); those that left unused in it count half."""
        ages = now - (self._now - np.arange(EPOCHS)) * self._epoch - self._epoch // 2
        youngest_first = self._coming[:, (self._now - np.arange(EPOCHS)) % EPOCHS]
        unused = self._unused.copy()
        # No product of matrices: the BLAS library's threads spin after one, and a step's threads then lack a core.
        np.add.at(unused.T, bins_of(np.clip(ages, 0, None)), youngest_first.T)
        reached = np.cumsum((self._used + unused)[:, ::-1], axis=1)[:, ::-1]
        return np.maximum(reached - unused / 2, 0.0)

    def _hazard(self, risk: Floats) -> Floats:
        """Returns the share used in each half-octave of each class, shrunk towards that of its ``uses``, of all
        pages, and PRIOR.
        """
        by_uses = (MOST_USES + 1, -1, BINS)
        used, reached = self._used.reshape(by_uses), risk.reshape(by_uses)
        overall = _drawn(used.sum((0, 1)), reached.sum((0, 1)), np.full(BINS, PRIOR))
        lifts = (1 + np.arange(MOST_USES + 1) / 2)[:, None]  # with nothing seen yet, what was used is used again
        of_uses = _drawn(used.sum(1), reached.sum(1), np.minimum(overall * lifts, 1.0))
        hints = np.tile([1.0, HINT], used.shape[1] // 2)[:, None]  # what a hint is worth is learned as all else
        return _drawn(used, reached, np.minimum(of_uses[:, None, :] * hints, 1.0)).reshape(CLASSES, BINS)

    def _advance(self, at: int) -> None:
        """Counts as unused those that joined a horizon ago and weren't used."""
        epoch = at // self._epoch
        for past in range(self._now + 1, min(epoch, self._now + EPOCHS) + 1):
            gone = np.maximum(self._coming[:, past % EPOCHS], 0.0)
            self._unused[:, bin_of(self.horizon)] += gone
            self._coming[:, past % EPOCHS] = 0.0
            self._weigh(float(gone.sum()))
        self._now = max(self._now, epoch)

    def _weigh(self, pages: float) -> None:
        self._seen += pages
        if self._seen > self._forget:
            self._seen /= 2
            self._used /= 2
            self._unused /= 2


CLASSES = (MOST_USES + 1) * (MOST_TURNS + 1) * GAPS * 2  # histories, each with and without a client's hint
# Bounds of the bins of age, in pages, because BINS counts half-octaves.
_EDGES = 2.0 ** (np.arange(BINS + 1) / 2) - 1
_WIDTHS = np.maximum(np.diff(_EDGES), 0.4)


def bin_of(age: int) -> int:
    """Returns the index of the half-octave of ``age``, a number of pages."""
    return min(BINS - 1, int(2 * log2(age + 1)))


def bins_of(ages: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the index of the half-octave of each age."""
    return np.minimum((2 * np.log2(ages + 1)).astype(np.int64), BINS - 1)


def gittins(hazard: Floats) -> Floats:
    """Returns the Gittins index of each class from each half-octave on: the best ratio of uses to time of keeping a
    page.

    ``hazard``, float64 (classes, half-octaves), is the share of the pages that reach a half-octave that are used in
    it; the result has the same shape.
    """
    found, count = np.empty_like(hazard), hazard.shape[1]
    stays = 1 - hazard
    spent = (1 - hazard / 2) * _WIDTHS[:count]
    for start in range(count):
        reach = np.ones((len(hazard), count - start))
        np.cumprod(stays[:, start:-1], axis=1, out=reach[:, 1:])
        uses = np.cumsum(reach * hazard[:, start:], axis=1)
        found[:, start] = (uses / np.cumsum(reach * spent[:, start:], axis=1)).max(axis=1)
    return found


def _drawn(used: Floats, reached: Floats, towards: Floats) -> Floats:
    return np.minimum((used + TRUST * towards) / (reached + TRUST), 0.999)
