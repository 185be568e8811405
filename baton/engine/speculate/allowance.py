"""Decides whether a step may hold drafts that could lengthen it in vain.

Knows nothing of drafts or of who proposes them. It keeps an account, in tokens, of what drafts brought or would
have brought, less what they cost: a cumulative sum (Page, 1954: https://doi.org/10.1093/biomet/41.1-2.100) that
luck seldom lifts to PROVEN. A step that users would feel has to bring clearly more than it costs.

Where the worth of drafts can't be seen cheaply without verifying them, a few steps may be lengthened on trial:
fewer than a 99th percentile sees, after a new worker's first steps.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from baton.engine.speculate.depth import cost, lengthened

SHARE = 500  # plain steps that save up for a step lengthened on trial: a 99th percentile sees one in a hundred
MOST_SAVED = 2.0  # steps saved up at most: what is lost in a row stays below a hundredth of a few hundred steps
FIRST_SAVED = 12.0  # steps that a new worker may lose, to tell apart drafts that stand by a third from others
START = 64  # steps in which what is left of these is forfeited
PROVEN = 5.0  # tokens gained that aren't luck: drafts that don't pay seldom bring so many
OWN_PROVEN = 1.0  # tokens gained by a sequence's own drafts, before they may make steps longer
OWN_MOST = 6.0  # of which it may lose all
PAID_SHARE = 0.75  # of the worker's last answers whose drafts paid, above which a new answer is trusted
LAST_ANSWERS = 16  # that this share is taken of, older ones fading
FAILED_KEEPS, NOTHING = 0.94, 0.05  # share of the tokens gained that is left when a watched draft fails; none below
MOST_LOST = 4.0  # steps that may be lost, all sequences together, when drafts that paid begin to fail


class Allowance:
    """Keeps account of the gains and losses of one worker's drafts; ``tries`` allows steps lengthened on trial."""

    def __init__(self, tries: bool = False) -> None:
        self._tries, self._saved, self._earned = tries, FIRST_SAVED if tries else 0.0, 0.0
        self._own: dict[int, float] = {}
        self._trusted: set[int] = set()
        self._paid = self._ended = 0.0  # faded counts of answers whose drafts paid, and of all that had any

    @property
    def is_new(self) -> bool:
        """Returns whether there is still something to be lost of what a new worker may lose."""
        return self._saved > MOST_SAVED

    @property
    def is_proven(self) -> bool:
        """Returns whether drafts have paid of late."""
        return self._earned >= PROVEN

    @property
    def is_promising(self) -> bool:
        """Returns whether drafts brought more than they cost of late, if only by luck."""
        return self._earned > 0.0

    def save(self, steps: int) -> None:
        """Records that ``steps`` more steps were run."""
        if self.is_new:
            self._saved = max(MOST_SAVED, self._saved - steps * (FIRST_SAVED - MOST_SAVED) / START)
        elif self._tries:
            self._saved = min(self._saved + steps / SHARE, MOST_SAVED)

    def allows(self, extra: float) -> bool:
        """Returns whether a step may be run that takes ``extra`` of a plain one more."""
        return self.is_proven or self._saved >= 1.0 + extra

    def trusts(self, seq: int) -> bool:
        """Returns whether the drafts of the sequence ``seq`` have paid of late, by its own account: it is trusted
        from OWN_PROVEN on, until all is lost. A new one is trusted where most of the last ones were.
        """
        return self._tries or seq in self._trusted or (seq not in self._own and self._trusts_new)

    @property
    def _trusts_new(self) -> bool:
        return self._paid >= PAID_SHARE * (self._ended + 1.0)

    def counts(self, seq: int) -> bool:
        """Returns whether a loss by drafts of the sequence ``seq`` would change any account."""
        return self.is_promising or self.hopes(seq)

    def hopes(self, seq: int) -> bool:
        """Returns whether the sequence's last drafts brought more than they cost, if only by luck."""
        return self._own.get(seq, 0.0) > 0.0

    def settle(self, seq: int, gain: float, sequences: int) -> None:
        """Records that the drafts of ``seq`` in a step of ``sequences`` brought ``gain`` tokens more than they
        cost, or would have.
        """
        self._earned = min(max(self._earned + gain, 0.0), PROVEN + MOST_LOST * sequences)
        if seq not in self._own and self._trusts_new:
            self._own[seq] = OWN_PROVEN
            self._trusted.add(seq)
        self._own[seq] = own = min(max(self._own.get(seq, 0.0) + gain, 0.0), OWN_MOST)
        if own >= OWN_PROVEN or (seq in self._trusted and own > 0.0):
            self._trusted.add(seq)
        else:
            self._trusted.discard(seq)

    def failed(self, seq: int) -> None:
        """Records that a draft of ``seq`` that was only watched brought nothing: if new, it has to earn trust, and
        what drafts gained before counts less.
        """
        self._own.setdefault(seq, 0.0)
        self._earned *= FAILED_KEEPS
        if self._earned < NOTHING:
            self._earned = 0.0

    def charge(self, extra: float) -> None:
        """Records that a step that took ``extra`` of a plain one more brought less than it cost."""
        if self._tries and not self.is_proven:
            self._saved -= 1.0 + extra

    def end(self, seq: int) -> None:
        """Forgets the account of the sequence ``seq``; it is remembered whether its drafts paid, if any were
        judged.
        """
        if self._own.pop(seq, None) is not None:
            keep, paid = 1.0 - 1.0 / LAST_ANSWERS, seq in self._trusted
            self._paid, self._ended = keep * self._paid + paid, keep * self._ended + 1.0
        self._trusted.discard(seq)


class Stake(NamedTuple):
    """Holds a step with drafts and the verdicts over them; ``seconds[k]`` is the duration of a step with k drafts,
    and a verdict names a sequence, and how many of its drafts were verified and accepted.
    """

    sequences: int
    seconds: NDArray[np.float64]
    verdicts: tuple[tuple[int, int, int], ...] = ()

    def judged(self, seq: int, verified: int, accepted: int) -> Stake:
        """Returns the stake with a verdict more."""
        return self._replace(verdicts=(*self.verdicts, (seq, verified, accepted)))

    def settle(self, allowance: Allowance) -> None:
        """Records what the drafts brought less what they cost."""
        verified = sum(one[1] for one in self.verdicts)
        if not verified:
            return
        price = cost(self.seconds, verified, self.sequences)
        if sum(one[2] for one in self.verdicts) < price:
            allowance.charge(lengthened(self.seconds, verified))
        for seq, count, accepted in self.verdicts:
            allowance.settle(seq, accepted - price * count / verified, self.sequences)
