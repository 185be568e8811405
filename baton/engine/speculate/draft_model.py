"""Drafts by a small model beside the target, with KV pages and steps of its own; each step serves all asked
sequences.

Knows nothing of the target but its tokens. A draft is chosen as the target would choose: with the request's
temperature and the same uniform random number of its position, so that two models that nearly agree choose alike.
KV of rejected tokens is overwritten. If pages run out, sequences asked longest ago lose theirs, and sequences
without pages have no drafts.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from baton.engine.plan import ModelSpec, Runner, SampleSpec, SequenceStep, StepPlan, StepResult
from baton.engine.request_checks import blocks_for
from baton.engine.speculate.draft import BatchSpeculator, Draft, SequenceView, States
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling

NAME = "draft"
CATCH_UP = 64  # tokens of a text that one call computes: a long prompt takes several steps
NEW = 0.1  # weight of the last step's time
log = logging.getLogger("baton.engine")


class DraftModel(BatchSpeculator):
    """Drafts by the model of ``runner`` on ``pages`` KV pages of its own; ``name`` is its drafts' source."""

    def __init__(
        self, runner: Runner, pages: int, clock: Callable[[], float] = time.perf_counter, name: str = NAME
    ) -> None:
        self._runner, self._clock, self.name = runner, clock, name
        self.spreads = False  # whether drafts come with the probabilities that they were drawn with
        self._spreads: dict[int, list[States]] = {}
        self._memory = bytearray(pages * runner.spec.layout.page_bytes)
        runner.bind(memoryview(self._memory), pages)
        self._free = list(range(pages))
        self._known: OrderedDict[int, _DraftState] = OrderedDict()
        self._drafts: dict[int, list[int]] = {}

    def prepare(self, texts: Sequence[SequenceView], budget: int) -> None:
        """Drafts ``budget`` tokens for each text whose KV is up to date, and computes KV of the others; takes
        ``budget`` steps of the draft model.
        """
        self._drafts, self._spreads = {}, {}
        turns = [turn for text in texts if (turn := self._turn(text, budget)) is not None]
        for _ in range(budget):
            turns = self._step(turns)

    def propose(self, text: SequenceView, budget: int) -> Draft | None:
        """Returns the draft that ``prepare`` made for the text, or None."""
        drafted = self._drafts.get(text.seq, [])[:budget]
        return Draft(drafted, self.name, 0, self._spreads.get(text.seq, ())) if drafted else None

    def read_prompt(self, text: SequenceView, idle: bool) -> int:
        """Computes KV of part of the prompt if the engine is idle and pages are free for all of it; returns the
        tokens computed.
        """
        known = self._known.get(text.seq)
        short = blocks_for(len(text.tokens) + 1) - (len(known.pages) if known else 0)
        if not idle or short > len(self._free) or len(text.tokens) + 1 >= self._runner.spec.max_model_len:
            return 0
        known = self._known.setdefault(text.seq, _DraftState(text))
        known.pages += [self._free.pop() for _ in range(short)]
        if (item := known.unsaid()) is None or not self._ran((item,)):
            return 0
        known.wrote(item)
        return len(item.tokens)

    def end(self, text: SequenceView) -> None:
        """Returns the text's pages to the pool."""
        known = self._known.pop(text.seq, None)
        if known is not None:
            self._free += known.pages

    def _turn(self, text: SequenceView, budget: int) -> _DraftState | None:
        """Returns the text's state with pages for its draft; None if it is too long or there are too few pages."""
        known = self._known.setdefault(text.seq, _DraftState(text))
        self._known.move_to_end(text.seq)
        known.follow()
        length = len(text.tokens) + budget
        if length >= self._runner.spec.max_model_len or not self._has_pages(known, length):
            return None
        return known

    def _has_pages(self, known: _DraftState, tokens: int) -> bool:
        short = blocks_for(tokens) - len(known.pages)
        while short > len(self._free) and next(iter(self._known.values())) is not known:
            self._free += self._known.popitem(last=False)[1].pages
        if short > len(self._free):
            return False
        known.pages += [self._free.pop() for _ in range(short)]
        return True

    def _step(self, turns: list[_DraftState]) -> list[_DraftState]:
        """Drafts one more token for each text, and returns the texts that go on; those whose prompt isn't computed
        yet leave.
        """
        turns = [known for known in turns if self._known.get(known.seq) is known]  # others took its pages
        if not turns:
            return []
        began = self._clock()
        result = self._ran(tuple([known.item(self.spreads) for known in turns]))
        if result is None:
            self._drafts = {}
            return []
        took = self._clock() - began
        self.round_s += NEW * (took - self.round_s) if self.round_s else took
        for one in result.sampled:
            self._drafts.setdefault(one.seq, []).append(one.token_id)
            if one.spread is not None:
                self._spreads.setdefault(one.seq, []).append(one.spread)
        drafted = {one.seq: one.token_id for one in result.sampled}
        for known in turns:
            known.ran(drafted.get(known.seq))
        return [known for known in turns if known.seq in drafted]

    def _ran(self, items: tuple[SequenceStep, ...]) -> StepResult | None:
        """Returns the result of a step of the draft model; None if it fails, which is logged and leaves answers
        unaffected.
        """
        try:
            return self._runner.run(StepPlan(items))
        except Exception:
            log.exception("the draft model failed; these sequences go on without it")
            return None


class _DraftState:
    """Holds one text's state: the tokens whose KV is in ``pages``, and the tokens to run next."""

    def __init__(self, text: SequenceView) -> None:
        self.seq, self._text = text.seq, text
        self.pages: list[int] = []
        self._kv: list[int] = []  # tokens whose KV is there, drafted ones included
        self._certain = 0  # of those, how many are known to be the text's
        self._ahead: list[int] = []  # tokens of the present draft
        self._sampling = plain_sampling(text.request.sampling)

    def follow(self) -> None:
        """Drops KV of drafted tokens that differ from the text, which has grown."""
        tokens, self._ahead = self._text.tokens, []
        same, most = self._certain, min(len(self._kv), len(tokens) - 1)
        while same < most and self._kv[same] == tokens[same]:
            same += 1
        del self._kv[same:]
        self._certain = same

    def item(self, spread: bool = False) -> SequenceStep:
        """Returns the step for the next tokens without KV; it samples the next token if these are the last."""
        start, length = len(self._kv), len(self._text.tokens) + len(self._ahead)
        end = min(length, start + CATCH_UP)
        tokens = [*self._text.tokens[start:end], *self._ahead[max(0, start - len(self._text.tokens)) :]]
        tokens = tokens[: end - start]
        request = self._text.request
        wanted = spread and self._sampling.temperature > 0.0
        spec = SampleSpec(self._sampling, request.choice, length, (), request.prompt_tokens, spread=wanted)
        return SequenceStep(
            self.seq, tokens, start, self.pages, spec if end == length else None, is_prefill=len(tokens) > 1
        )

    def unsaid(self) -> SequenceStep | None:
        """Returns the step for the next tokens without KV, but for the last token, after which a draft begins; None
        if there is none.
        """
        start = len(self._kv)
        tokens = self._text.tokens[start : min(len(self._text.tokens) - 1, start + CATCH_UP)]
        return SequenceStep(self.seq, tokens, start, self.pages, is_prefill=True) if tokens else None

    def wrote(self, step: SequenceStep) -> None:
        """Records that the tokens of ``step`` have their KV."""
        self._kv += step.tokens

    def ran(self, drafted: int | None) -> None:
        """Records that the item was run, and the token drafted after it."""
        self.wrote(self.item())
        if drafted is not None:
            self._ahead.append(drafted)


def plain_sampling(sampling: Sampling) -> Sampling:
    """Returns ``sampling`` without penalties, logit bias, logprobs and grammar, as drafts are chosen."""
    return msgspec.structs.replace(
        sampling,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        logit_bias={},
        logprobs=None,
        grammar=None,
    )


def require_same_tokens(draft: ModelSpec, target: ModelSpec, name: str) -> None:
    """Raises ConfigError unless the draft model's vocabulary size and end tokens are the target's; ``name`` is the
    speculator's.
    """
    have, want = draft.vocab_size, target.vocab_size
    if have != want or draft.eos_token_ids != target.eos_token_ids:
        text = f"speculation {name}: the draft model has {have} tokens and the model {want}"
        if have == want:
            text = f"speculation {name}: the draft model's end tokens aren't the model's"
        raise ConfigError(f"{text}; a draft model must have the model's tokenizer", "speculation")
