"""Compares drafts with what the target wrote without them: they are judged, and no step gets longer.

Knows nothing of costs or estimates. A draft that is accepted by choice would have been accepted exactly as far as
it equals the tokens that follow. Where calls for drafts are felt and therefore few, one that looks back, on a text
as it was some tokens ago, tells as much as many.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

from baton.engine.speculate.draft import Draft, SequenceView
from baton.engine.speculate.tree import ROOT, depths
from baton.protos.nouns import EngineRequest

AGREED = 2  # tokens in which a draft and its text agree, seldom by chance
LEAST_WATCHED = 4  # places ahead that a draft is compared with what is written
MOST_PLACES = 32  # tokens of an answer that are looked back on


class Watch(NamedTuple):
    """Holds a draft of which not every token was verified.

    ``at`` is the length of its text when it was proposed, and ``enough`` the number of further tokens that are
    waited for. ``nodes`` were verified or, if ``cost`` isn't None, would have been, had that been allowed; ``cost``
    is what they had to bring, in tokens, in a step of ``sequences``. Neither is known unless ``is_weighed``.
    ``is_rest`` marks what is left of a draft that was watched before.
    """

    draft: Draft
    at: int
    enough: int
    nodes: Sequence[int] = ()
    cost: float | None = None
    sequences: int = 1
    is_weighed: bool = False
    is_rest: bool = False


class DraftVerdict(NamedTuple):
    """Says which rows of a step with the whole draft would have been accepted, row 0 (the last known token) first.
    Nothing is known yet of the nodes ``unseen``.
    """

    watch: Watch
    rows: Sequence[int]
    unseen: Sequence[int]

    @property
    def brought(self) -> int:
        """Returns how many tokens of the watched nodes stood."""
        wanted = set(self.watch.nodes)
        return sum(row - 1 in wanted for row in self.rows[1:])

    def rest(self) -> Watch | None:
        """Returns what is left of a chain behind the tokens that a step with the watched nodes would have brought,
        as a draft to be watched on its own; None if no token stood, or little is left.

        It stands for what a call for drafts at that place would bring, and tells it without the call.
        """
        draft, taken = self.watch.draft, min(len(self.rows) - 1, len(self.watch.nodes)) + 1
        if draft.parents or len(self.rows) == 1 or len(draft.tokens) - taken < AGREED:
            return None
        left = draft._replace(tokens=draft.tokens[taken:], spreads=())
        enough = min(LEAST_WATCHED, len(left.tokens))
        return Watch(left, self.watch.at + taken, enough, sequences=self.watch.sequences, is_rest=True)


class Watches:
    """Holds at most one watched draft per sequence."""

    def __init__(self) -> None:
        self._watched: dict[int, Watch] = {}

    def __contains__(self, seq: int) -> bool:
        return seq in self._watched

    def __len__(self) -> int:
        return len(self._watched)

    def begin(self, seq: int, watch: Watch) -> None:
        """Watches a draft of sequence ``seq``, unless one is watched."""
        self._watched.setdefault(seq, watch)

    def agrees(self, seq: int, length: int) -> bool:
        """Returns whether a draft of sequence ``seq`` is watched that agrees with AGREED or more tokens of its text
        of ``length`` tokens; ``verdict`` was asked before.
        """
        watch = self._watched.get(seq)
        return watch is not None and length >= watch.at + AGREED

    def verdict(self, seq: int, tokens: Sequence[int], is_last: bool = False) -> DraftVerdict | None:
        """Returns the verdict over the sequence's draft, and forgets it, once ``tokens`` differ from it, have as
        many as are waited for, or are the last ones; None before.
        """
        watch = self._watched.get(seq)
        if watch is None or (len(tokens) == watch.at and not is_last):
            return None
        coming = tokens[watch.at : watch.at + len(watch.draft.tokens)]
        rows, ended = _stood(watch.draft, coming)
        if not ended and len(coming) < watch.enough and not is_last:
            return None
        del self._watched[seq]
        return DraftVerdict(watch, rows, () if ended else _beyond(watch.draft, len(coming)))


def _stood(draft: Draft, coming: Sequence[int]) -> tuple[Sequence[int], bool]:
    """Returns the rows of a step with ``draft`` that the tokens ``coming`` accept, and whether no further one can
    be.
    """
    if not draft.parents:
        for count, (token, wrote) in enumerate(zip(draft.tokens, coming, strict=False)):
            if token != wrote:
                return range(count + 1), True
        return range(len(coming) + 1), len(coming) >= len(draft.tokens)
    rows, node = [0], ROOT
    for wrote in coming:
        children = [at for at, parent in enumerate(draft.parents) if parent == node]
        found = next((at for at in children if draft.tokens[at] == wrote), None)
        if found is None:
            return rows, True
        node = found
        rows.append(node + 1)
    return rows, node not in draft.parents


def _beyond(draft: Draft, places: int) -> Sequence[int]:
    """Returns the nodes of ``draft`` that are more than ``places`` ahead."""
    if not draft.parents:
        return range(places, len(draft.tokens))
    return [node for node, depth in enumerate(depths(draft.parents)) if depth >= places]


class Beginning(Sequence[int]):
    """Is the first ``length`` of ``tokens``, without a copy."""

    def __init__(self, tokens: Sequence[int], length: int) -> None:
        self._tokens, self._length = tokens, length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, at: int) -> int: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[int]: ...

    def __getitem__(self, at: int | slice) -> int | Sequence[int]:
        if isinstance(at, slice):
            begin, end, step = at.indices(self._length)
            return self._tokens[begin:end:step]
        return self._tokens[range(self._length)[at]]

    def __iter__(self) -> Iterator[int]:
        return iter(self._tokens[: self._length])


class EarlierView(NamedTuple):
    """Is a sequence as it was when it had fewer tokens. What its grammar forced then isn't known."""

    seq: int
    request: EngineRequest
    tokens: Sequence[int]
    outputs: int
    draft_room: int
    forced: Sequence[int] = ()


def earlier(text: SequenceView, length: int) -> EarlierView:
    """Returns ``text`` as it was with its first ``length`` tokens, which end in its answer or where that begins."""
    left, most = len(text.tokens) - length, text.request.sampling.max_drafts
    room = left if most is None else min(left, most)
    return EarlierView(text.seq, text.request, Beginning(text.tokens, length), text.outputs - left, room)


def places(text: SequenceView, most: int) -> range:
    """Returns the lengths of ``text`` at up to ``most`` places of its answer, to look back on."""
    length = len(text.tokens)
    return range(length - min(text.outputs, MOST_PLACES, most), length)
