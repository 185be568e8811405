"""Drafts by an EAGLE-3 layer: it reads the target's hidden states of three layers and predicts one token at a time.

Knows nothing of runners, pages or files. The layer's own keys and values are kept for the last positions of each
text. States exist only for positions that this worker computes: of a prompt received as KV there are none, and the
layer begins at the first position computed here. After a gap (for instance a preemption) it begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from baton.engine.speculate.draft import Draft, SequenceView, States, StateSpeculator
from baton.engine.speculate.heads.draws import drawn, grades, may_branch
from baton.engine.speculate.heads.eagle3_layer import NAME, Eagle3Layer, LayerInput, Rows

MOST_WAITING = 64  # unread states of a text while no drafts are asked for; each has three hidden sizes
KEEP = 1024  # positions of a text that drafts look back on at least; twice as many at most
NEW = 0.1  # weight of the last round's time
GUESSES = 3  # tokens at each place of a tree


class Eagle3(StateSpeculator):
    """Drafts by an EAGLE-3 layer from the states of every row. ``vocab`` is the size of the target's vocabulary."""

    name = NAME
    every_row = True

    def __init__(self, layer: Eagle3Layer, vocab: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._layer, self.layers, self._vocab, self._clock = layer, layer.layers, vocab, clock
        self._known: dict[int, _DraftState] = {}
        self._drafts: dict[int, Draft] = {}

    def saw(self, text: SequenceView, first: int, states: States) -> None:
        """Takes the states (rows, 3 x hidden) of positions ``first``, ``first`` + 1, …; each is read once its next
        token is known.
        """
        with torch.inference_mode():
            known = self._known.get(text.seq)
            if known is None or known.end != first:
                first, states = first + max(0, len(states) - KEEP), states[-KEEP:]
                known = self._known[text.seq] = _DraftState(text, Rows(first, self._layer.sizes))
            known.take(torch.from_numpy(states.copy()))  # else it would hold the whole step's
            if known.waiting > MOST_WAITING:
                self._read([known])

    def prepare(self, texts: Sequence[SequenceView], budget: int) -> None:
        """Drafts ``budget`` tokens for each text whose latest states have been seen; one pass of the layer per
        token.
        """
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

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns the draft that ``prepare`` made, at most ``budget`` places deep, or None."""
        found = self._drafts.get(text.seq)
        return None if found is None else found.cut(budget)

    def end(self, text: SequenceView) -> None:
        """Forgets the text's states, keys and values."""
        self._known.pop(text.seq, None)

    def _read(self, knowns: Sequence[_DraftState]) -> None:
        """Runs the layer over the states whose next token is known."""
        found = [(known, layer_input) for known in knowns if (layer_input := known.layer_input()) is not None]
        if not found:
            return
        counts = [len(layer_input.tokens) for _, layer_input in found]
        joined = self._layer.joined(torch.cat([layer_input.states for _, layer_input in found])).split(counts)
        read = [layer_input._replace(states=states) for (_, layer_input), states in zip(found, joined, strict=True)]
        out, at = self._layer.forward(read), 0
        for known, layer_input in found:
            at += len(layer_input.tokens)
            known.read(len(layer_input.tokens), out[at - 1])

    def _draft(self, chain: list[int], others: Sequence[Sequence[int]], grade: int) -> Draft:
        """Returns the chain as a draft, with the next likeliest tokens at each place if there are any."""
        beside = ([*chain[:at], other] for at, found in enumerate(others) for other in found)
        return Draft.of_paths([chain, *beside], NAME, grade) if others else Draft(chain, NAME, grade)

    def _written(self, knowns: Sequence[_DraftState], budget: int) -> tuple[list[list[int]], list[int]]:
        """Returns ``budget`` tokens after each text, and the grade of each first one; the drafts' keys are
        forgotten.
        """
        counts, ranks = [known.rows.count for known in knowns], list[int]()
        for known in knowns:
            known.others = []
        states, drafts = torch.stack([known.last for known in knowns]), [list[int]() for _ in knowns]
        for ahead in range(budget):
            if ahead:
                rows = zip(knowns, states.split(1), drafts, strict=True)
                states = self._layer.forward(
                    [LayerInput(known.rows, row, draft[-1:]) for known, row, draft in rows]
                )
            logits = self._layer.logits(states)
            ranks = ranks or grades(logits)
            for draft, token in zip(drafts, self._tokens(logits, knowns, ahead), strict=True):
                draft.append(token)
            if self.branches:
                self._guess_others(logits, knowns)
        for known, count in zip(knowns, counts, strict=True):
            known.rows.cut(count)
        return drafts, ranks

    def _guess_others(self, logits: Tensor, knowns: Sequence[_DraftState]) -> None:
        """Keeps the second and third guesses of texts that are decoded greedily."""
        tops = self._layer.ids[logits.topk(min(GUESSES, logits.shape[-1]), -1).indices].tolist()
        for known, guesses in zip(knowns, tops, strict=True):
            if may_branch(known.text):
                known.others.append(guesses[1:])

    def _tokens(self, logits: Tensor, knowns: Sequence[_DraftState], ahead: int) -> list[int]:
        if all(known.text.request.sampling.temperature == 0.0 for known in knowns):
            found: list[int] = self._layer.ids[logits.argmax(-1)].tolist()
            return found
        return drawn(self._layer.full(logits, self._vocab), [known.text for known in knowns], ahead)


class _DraftState:
    """Holds one text's keys and values, the states that wait for their next token, and the layer's last output
    state.
    """

    def __init__(self, text: SequenceView, rows: Rows) -> None:
        self.text, self.rows = text, rows
        self.last = torch.empty(0)
        self.others: list[list[int]] = []  # next likeliest tokens by place of the present draft
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
        """Returns whether every state up to the one that chose the last token is known."""
        return self.end == len(self.text.tokens) - 1

    def take(self, states: Tensor) -> None:
        """Adds states (rows, 3 x hidden); each is read once the token after it is known."""
        self._waiting.append(states)
        self._count += len(states)

    def layer_input(self) -> LayerInput | None:
        """Returns the states that can be read now, with their next tokens; None if there are none."""
        start = self.rows.end
        tokens = self.text.tokens[start + 1 : start + 1 + self._count]
        if not tokens:
            return None
        self._waiting = [torch.cat(self._waiting)]
        return LayerInput(self.rows, self._waiting[0][: len(tokens)], tokens)

    def read(self, count: int, last: Tensor) -> None:
        """Records that ``count`` positions were read; ``last`` is the layer's output state of the last one."""
        self._waiting, self._count = [self._waiting[0][count:]] if count < self._count else [], self._count - count
        self.last = last.clone()
        self.rows.forget_old(KEEP)
