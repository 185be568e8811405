"""Drafts by an EAGLE-3 layer: it reads the target's states of three layers and writes ahead, a token at a time.

Knows nothing of runners, pages or files. Keys and values of its own are kept for the last positions of each text.
States are seen only of what this worker computes: of a prompt that came as KV from elsewhere there are none, and
the layer begins where this worker did. A gap (after a preemption, say) begins it anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine.speculate.draft import Draft, States, StateSpeculator, Text
from baton.engine.speculate.heads.draws import drawn, grades, may_branch
from baton.engine.speculate.heads.eagle3_layer import NAME, Eagle3Layer, Rows, Stretch

MOST_WAITING = 64  # states of a text that wait unread, where nobody asks for drafts: three hidden sizes each
KEEP = 1024  # positions of a text that drafts look back on at least; twice as many at most
NEW = 0.1  # weight of the last round's time
GUESSES = 3  # at each place, where drafts may branch


class Eagle3(StateSpeculator):
    """Implements ``StateSpeculator``: it looks at every row. ``vocab`` is the target's."""

    name = NAME
    every_row = True

    def __init__(self, layer: Eagle3Layer, vocab: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._layer, self.layers, self._vocab, self._clock = layer, layer.layers, vocab, clock
        self._known: dict[int, _Known] = {}
        self._drafts: dict[int, Draft] = {}

    def saw(self, text: Text, first: int, states: States) -> None:
        """Takes the states of positions ``first``, ``first`` + 1, …; reads those whose next token is known."""
        with torch.inference_mode():
            known = self._known.get(text.seq)
            if known is None or known.end != first:
                first, states = first + max(0, len(states) - KEEP), states[-KEEP:]
                known = self._known[text.seq] = _Known(text, Rows(first, self._layer.sizes))
            known.take(torch.from_numpy(states.copy()))  # else it would hold the whole step's
            if known.waiting > MOST_WAITING:
                self._read([known])

    def prepare(self, texts: Sequence[Text], budget: int) -> None:
        """Drafts ``budget`` tokens of each text whose last states were seen; a round of the layer for each."""
        self._drafts = {}
        ready = [known for text in texts if (known := self._known.get(text.seq)) is not None and known.is_current]
        if not ready:
            return
        began = self._clock()
        with torch.inference_mode():
            self._read(ready)
            drafts, ranks = self._written(ready, budget)
        took = (self._clock() - began) / budget
        self.round_s += NEW * (took - self.round_s) if self.round_s else took
        for known, chain, grade in zip(ready, drafts, ranks, strict=True):
            self._drafts[known.text.seq] = self._draft(chain, known.others, grade)

    def propose(self, text: Text, budget: int) -> Draft | None:
        """Returns what ``prepare`` drafted."""
        found = self._drafts.get(text.seq)
        return None if found is None else found.cut(budget)

    def end(self, text: Text) -> None:
        """Forgets the text's states, keys and values."""
        self._known.pop(text.seq, None)

    def _read(self, knowns: Sequence[_Known]) -> None:
        """Lets the layer read the states whose next token is known."""
        found = [(known, stretch) for known in knowns if (stretch := known.stretch()) is not None]
        if not found:
            return
        counts = [len(stretch.tokens) for _, stretch in found]
        joined = self._layer.joined(torch.cat([stretch.states for _, stretch in found])).split(counts)
        read = [stretch._replace(states=states) for (_, stretch), states in zip(found, joined, strict=True)]
        out, at = self._layer.forward(read), 0
        for known, stretch in found:
            at += len(stretch.tokens)
            known.read(len(stretch.tokens), out[at - 1])

    def _draft(self, chain: list[int], others: Sequence[Sequence[int]], grade: int) -> Draft:
        """The chain, and beside each of its tokens what the layer thought next likely."""
        beside = ([*chain[:at], other] for at, found in enumerate(others) for other in found)
        return Draft.of_paths([chain, *beside], NAME, grade) if others else Draft(chain, NAME, grade)

    def _written(self, knowns: Sequence[_Known], budget: int) -> tuple[list[list[int]], list[int]]:
        """``budget`` tokens behind each text, and the grades of the first ones; drafts' keys are forgotten."""
        counts, ranks = [known.rows.count for known in knowns], list[int]()
        for known in knowns:
            known.others = []
        states, drafts = torch.stack([known.last for known in knowns]), [list[int]() for _ in knowns]
        for ahead in range(budget):
            if ahead:
                rows = zip(knowns, states.split(1), drafts, strict=True)
                states = self._layer.forward([Stretch(known.rows, row, draft[-1:]) for known, row, draft in rows])
            logits = self._layer.logits(states)
            ranks = ranks or grades(logits)
            for draft, token in zip(drafts, self._tokens(logits, knowns, ahead), strict=True):
                draft.append(token)
            if self.branches:
                self._guess_others(logits, knowns)
        for known, count in zip(knowns, counts, strict=True):
            known.rows.cut(count)
        return drafts, ranks

    def _guess_others(self, logits: Tensor, knowns: Sequence[_Known]) -> None:
        """Keeps the second and third guesses of texts whose likeliest token is wanted."""
        tops = self._layer.ids[logits.topk(min(GUESSES, logits.shape[-1]), -1).indices].tolist()
        for known, guesses in zip(knowns, tops, strict=True):
            if may_branch(known.text):
                known.others.append(guesses[1:])

    def _tokens(self, logits: Tensor, knowns: Sequence[_Known], ahead: int) -> list[int]:
        if all(known.text.request.sampling.temperature == 0.0 for known in knowns):
            found: list[int] = self._layer.ids[logits.argmax(-1)].tolist()
            return found
        return drawn(self._layer.full(logits, self._vocab), [known.text for known in knowns], ahead)


class _Known:
    """One text: its keys and values, the states that wait for their next token, and the layer's last state."""

    def __init__(self, text: Text, rows: Rows) -> None:
        self.text, self.rows = text, rows
        self.last = torch.empty(0)
        self.others: list[list[int]] = []  # of the present draft, by place: what was thought next likely
        self._waiting: list[Tensor] = []
        self._count = 0

    @property
    def waiting(self) -> int:
        """Returns the number of states that weren't read yet."""
        return self._count

    @property
    def end(self) -> int:
        """Returns the position whose state comes next."""
        return self.rows.end + self._count

    @property
    def is_current(self) -> bool:
        """Tells whether every state up to the one that chose the last token is here."""
        return self.end == len(self.text.tokens) - 1

    def take(self, states: Tensor) -> None:
        """Adds states; they are read once the token behind each is known."""
        self._waiting.append(states)
        self._count += len(states)

    def stretch(self) -> Stretch | None:
        """What can be read now."""
        start = self.rows.end
        tokens = self.text.tokens[start + 1 : start + 1 + self._count]
        if not tokens:
            return None
        self._waiting = [torch.cat(self._waiting)]
        return Stretch(self.rows, self._waiting[0][: len(tokens)], tokens)

    def read(self, count: int, last: Tensor) -> None:
        """``count`` positions were read; ``last`` is the layer's state behind them."""
        self._waiting, self._count = [self._waiting[0][count:]] if count < self._count else [], self._count - count
        self.last = last.clone()
        self.rows.forget_old(KEEP)
