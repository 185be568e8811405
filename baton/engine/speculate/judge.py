"""Learns from drafts that weren't verified: how far they equal what was written, and what that would have brought.

Knows nothing of who drafts. While drafts aren't known to pay, a draft is only kept; what it would have cost is
reckoned when it has agreed with something, so that drafts which don't stand take next to no time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from baton.engine.speculate.acceptance import AcceptanceEstimate
from baton.engine.speculate.allowance import Allowance
from baton.engine.speculate.call_estimate import CallEstimate
from baton.engine.speculate.depth import best_depths, cost
from baton.engine.speculate.draft import Draft, SequenceView
from baton.engine.speculate.row_cost import RowCost, Vector
from baton.engine.speculate.watch import LEAST_WATCHED, DraftVerdict, Watch, Watches, earlier, places

MOST_ROWS = 256  # drafts in one step


class Writer(SequenceView, Protocol):
    """Is a sequence that gets its next token in this step."""

    @property
    def draft_room(self) -> int:
        """Returns the most drafts that may follow its last token."""


class WeighedDraft(NamedTuple):
    """Holds a draft, its tokens' chances from the best on, and the token that each belongs to."""

    text: Writer
    draft: Draft
    chances: list[float]
    order: Sequence[int]

    @classmethod
    def of(cls, text: Writer, draft: Draft, chances: list[float]) -> WeighedDraft:
        """Returns ``draft`` of ``text`` with the ``chances`` of its tokens, of a tree sorted by chance."""
        if not draft.parents:
            return cls(text, draft, chances, range(len(chances)))
        order = ordered(chances)
        return cls(text, draft, [chances[node] for node in order], order)


def ordered(chances: Sequence[float]) -> Sequence[int]:
    """Returns the nodes of a tree from the likeliest on, parents before their children."""
    return sorted(range(len(chances)), key=lambda node: -chances[node])  # stable: parents stay before children


class DraftJudge:
    """Keeps at most one draft per sequence until what is written shows how far it would have been accepted."""

    def __init__(
        self, chances: AcceptanceEstimate, costs: RowCost, asking: CallEstimate, allowance: Allowance
    ) -> None:
        self._chances, self._costs, self._asking, self._allowance = chances, costs, asking, allowance
        self._watches = Watches()
        self._judged: dict[int, int] = {}  # by sequence: the length of its text up to which drafts were judged

    def __contains__(self, seq: int) -> bool:
        return seq in self._watches

    @property
    def is_watching(self) -> bool:
        """Returns whether any draft is kept."""
        return bool(self._watches)

    def agrees(self, seq: int, length: int) -> bool:
        """Returns whether a draft of ``seq`` is kept that agrees with its text of ``length`` tokens so far;
        ``learn`` was called before.
        """
        return self._watches.agrees(seq, length)

    def keep(self, text: SequenceView, draft: Draft, sequences: int) -> None:
        """Keeps a draft that was proposed in a step of ``sequences`` and isn't verified, to judge it later."""
        self._watches.begin(text.seq, Watch(draft, len(text.tokens), LEAST_WATCHED, sequences=sequences))

    def verified(self, seq: int, length: int) -> None:
        """Records that drafts of ``seq`` were verified up to its text's ``length``: there is nothing to look back
        on.
        """
        self._judged[seq] = length

    def look_back(
        self, text: SequenceView, drafts: Callable[[Writer], Draft | None], sequences: int, most: int
    ) -> int:
        """Judges the ``drafts`` that would have been made at up to ``most`` places while the answer was written,
        each where the last one that was judged would have left off; returns their number. One that agrees with
        all that was written since is kept.
        """
        made = 0
        for at in () if text.seq in self._watches else places(text, most):
            if at < self._judged.get(text.seq, 0):
                continue
            draft, made = drafts(earlier(text, at)), made + 1
            if draft is None:
                self._judged[text.seq] = at + 1
                continue
            self._watches.begin(text.seq, Watch(draft, at, LEAST_WATCHED, sequences=sequences))
            self.learn(text)
            if text.seq in self._watches:
                break
        return made

    def keep_rest(
        self, weighed: Sequence[WeighedDraft], depths: Sequence[int], seconds: Vector, count: int
    ) -> set[int]:
        """Keeps what a step of ``count`` sequences doesn't verify of the drafts; returns the sequences whose
        accounts will tell what it would have brought.
        """
        alike, waiting = seconds[::count], set[int]()  # the first: the seconds if each sequence had such a draft
        for one, done in zip(weighed, depths, strict=True):
            if done == len(one.draft.tokens):
                continue
            depth = done or best_depths([one.chances], 1, alike)[0]
            price, enough = (None, done + 1) if done else (cost(alike, depth, 1), max(depth, LEAST_WATCHED))
            watch = Watch(one.draft, len(one.text.tokens), enough, one.order[:depth], price, count, True)
            self._watches.begin(one.text.seq, watch)
            if depth > done:
                waiting.add(one.text.seq)
        return waiting

    def learn(self, text: SequenceView, is_last: bool = False) -> None:
        """Judges the draft that is kept of ``text``, if enough was written since, or nothing more will be."""
        verdict = self._watches.verdict(text.seq, text.tokens, is_last)
        if is_last:
            self._judged.pop(text.seq, None)
        elif verdict is not None:
            self._judged[text.seq] = verdict.watch.at + len(verdict.rows)
        if verdict is None:
            return
        if verdict.watch.is_weighed:
            self._settle(text.seq, verdict)
        elif len(verdict.rows) == 1 and (verdict.watch.is_rest or not self._allowance.counts(text.seq)):
            self._dismiss(text.seq, verdict)  # it brought nothing, and there is nothing to lose
        else:
            self._weigh(text.seq, verdict, is_last)
        if text.seq in self._watches:
            self.learn(text, is_last)

    def _weigh(self, seq: int, verdict: DraftVerdict, is_last: bool) -> None:
        """Reckons what the draft would have cost, and goes on waiting if it would have been longer."""
        watch, count = verdict.watch, verdict.watch.sequences
        alike = self._costs.seconds(count, min(MOST_ROWS, self._costs.reach(count) - count))[::count]
        chances = self._chances.cumulative(seq, watch.draft)
        order = ordered(chances) if watch.draft.parents else range(len(chances))
        depth = best_depths([[chances[node] for node in order]], 1, alike)[0]
        if not depth:
            self._dismiss(seq, verdict)
            if not watch.is_rest:
                self._go_on(seq, verdict)  # by what was learned of it, what is left may be worth its rows
            return
        weighed = watch._replace(nodes=order[:depth], cost=cost(alike, depth, 1), is_weighed=True, enough=depth)
        if verdict.unseen and len(verdict.rows) <= depth and not is_last:
            self._watches.begin(seq, weighed)
        else:
            self._settle(seq, verdict._replace(watch=weighed))

    def _dismiss(self, seq: int, verdict: DraftVerdict) -> None:
        """Learns from a draft that wouldn't have been verified, or of which nothing stood."""
        if verdict.watch.is_rest:
            return
        if len(verdict.rows) == 1:
            self._allowance.failed(seq)
        self._chances.judge(seq, verdict.watch.draft, len(verdict.rows) - 1, verdict.rows, verdict.unseen)
        self._asking.brought(seq, 0)

    def _settle(self, seq: int, verdict: DraftVerdict) -> None:
        watch, rows = verdict.watch, verdict.rows
        if not watch.is_rest:
            known = verdict.unseen if watch.cost is not None else {*watch.nodes, *verdict.unseen}
            self._chances.judge(seq, watch.draft, len(rows) - 1, rows, known)
        if watch.cost is None or not watch.nodes:
            return
        if not watch.is_rest:
            self._asking.brought(seq, verdict.brought)
        self._go_on(seq, verdict)
        self._allowance.settle(seq, verdict.brought - watch.cost, watch.sequences)

    def _go_on(self, seq: int, verdict: DraftVerdict) -> None:
        """Keeps what is left of a draft until it is known that drafts pay."""
        if not self._allowance.is_proven and (rest := verdict.rest()) is not None:
            self._watches.begin(seq, rest)
