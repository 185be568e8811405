"""Drafts by a small model beside the target: its own KV pages, its own steps, all asked sequences in each.

Knows nothing of the target but what its tokens are. A draft is chosen as the target would choose: by the request's
temperature and the very uniform number of its position, so that two models that nearly agree choose alike. KV of
what wasn't accepted is overwritten. Texts that find no page have no drafts; those asked longest ago give way.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from baton.engine.checks import blocks_for
from baton.engine.plan import ModelSpec, Runner, SampleSpec, SequenceStep, StepPlan, StepResult
from baton.engine.speculate.draft import BatchSpeculator, Draft, States, Text
from baton.protos.errors import ConfigError
from baton.protos.nouns import Sampling

NAME = "draft"
CATCH_UP = 64  # tokens of a text that one call reads: a long prompt is read in over some steps
NEW = 0.1  # weight of the last step's time
log = logging.getLogger("baton.engine")


class DraftModel(BatchSpeculator):
    """``runner`` is the draft model's, on ``pages`` pages of its own; ``name`` is its drafts' source."""

    def __init__(
        self, runner: Runner, pages: int, clock: Callable[[], float] = time.perf_counter, name: str = NAME
    ) -> None:
        self._runner, self._clock, self.name = runner, clock, name
        self.spreads = False  # whether drafts come with the probabilities that they were drawn by
        self._spreads: dict[int, list[States]] = {}
        self._memory = bytearray(pages * runner.spec.layout.page_bytes)
        runner.bind(memoryview(self._memory), pages)
        self._free = list(range(pages))
        self._known: OrderedDict[int, _Known] = OrderedDict()
        self._drafts: dict[int, list[int]] = {}

    def prepare(self, texts: Sequence[Text], budget: int) -> None:
        """Drafts ``budget`` tokens of each text that is read in; one step of the draft model for each token."""
        self._drafts, self._spreads = {}, {}
        turns = [turn for text in texts if (turn := self._turn(text, budget)) is not None]
        for _ in range(budget):
            turns = self._step(turns)

    def propose(self, text: Text, budget: int) -> Draft | None:
        """Returns what ``prepare`` has drafted for the text."""
        drafted = self._drafts.get(text.seq, [])[:budget]
        return Draft(drafted, self.name, 0, self._spreads.get(text.seq, ())) if drafted else None

    def read_ahead(self, text: Text, idle: bool) -> int:
        """Computes KV of some of the prompt, where nothing else is to do and pages are free for all of it."""
        known = self._known.get(text.seq)
        short = blocks_for(len(text.tokens) + 1) - (len(known.pages) if known else 0)
        if not idle or short > len(self._free) or len(text.tokens) + 1 >= self._runner.spec.max_model_len:
            return 0
        known = self._known.setdefault(text.seq, _Known(text))
        known.pages += [self._free.pop() for _ in range(short)]
        if (item := known.unsaid()) is None or not self._ran((item,)):
            return 0
        known.wrote(item)
        return len(item.tokens)

    def end(self, text: Text) -> None:
        """Gives the text's pages back."""
        known = self._known.pop(text.seq, None)
        if known is not None:
            self._free += known.pages

    def _turn(self, text: Text, budget: int) -> _Known | None:
        """The text, with pages for its draft; None where it is still being read, too long, or finds no page."""
        known = self._known.setdefault(text.seq, _Known(text))
        self._known.move_to_end(text.seq)
        known.follow()
        length = len(text.tokens) + budget
        if length >= self._runner.spec.max_model_len or not self._has_pages(known, length):
            return None
        return known

    def _has_pages(self, known: _Known, tokens: int) -> bool:
        short = blocks_for(tokens) - len(known.pages)
        while short > len(self._free) and next(iter(self._known.values())) is not known:
            self._free += self._known.popitem(last=False)[1].pages
        if short > len(self._free):
            return False
        known.pages += [self._free.pop() for _ in range(short)]
        return True

    def _step(self, turns: list[_Known]) -> list[_Known]:
        """One token more of each; those whose text isn't read yet leave."""
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
        """A step of the draft model; None where it fails, which the answers don't need to know."""
        try:
            return self._runner.run(StepPlan(items))
        except Exception:
            log.exception("the draft model failed; these sequences go on without it")
            return None


class _Known:
    """One text: which tokens have KV in ``pages``, and what is to be run next."""

    def __init__(self, text: Text) -> None:
        self.seq, self._text = text.seq, text
        self.pages: list[int] = []
        self._kv: list[int] = []  # tokens whose KV is there, drafted ones included
        self._certain = 0  # of those, how many are known to be the text's
        self._ahead: list[int] = []  # tokens of the present draft
        self._sampling = plain_sampling(text.request.sampling)

    def follow(self) -> None:
        """The text has grown: what was drafted otherwise is forgotten."""
        tokens, self._ahead = self._text.tokens, []
        same, most = self._certain, min(len(self._kv), len(tokens) - 1)
        while same < most and self._kv[same] == tokens[same]:
            same += 1
        del self._kv[same:]
        self._certain = same

    def item(self, spread: bool = False) -> SequenceStep:
        """The next tokens without KV, and the token that follows, if these are the last."""
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
        """The next tokens without KV but the last, behind which a draft begins; None where there is none."""
        start = len(self._kv)
        tokens = self._text.tokens[start : min(len(self._text.tokens) - 1, start + CATCH_UP)]
        return SequenceStep(self.seq, tokens, start, self.pages, is_prefill=True) if tokens else None

    def wrote(self, step: SequenceStep) -> None:
        """The tokens of ``step`` have their KV."""
        self._kv += step.tokens

    def ran(self, drafted: int | None) -> None:
        """The item was run; ``drafted`` follows it."""
        self.wrote(self.item())
        if drafted is not None:
            self._ahead.append(drafted)


def plain_sampling(sampling: Sampling) -> Sampling:
    """Returns how drafts are chosen: as the request asks, without what looks at other tokens."""
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
    """Raises ConfigError where the draft model's token ids can't be the target's."""
    have, want = draft.vocab_size, target.vocab_size
    if have != want or draft.eos_token_ids != target.eos_token_ids:
        text = f"speculation {name}: the draft model has {have} tokens and the model {want}"
        if have == want:
            text = f"speculation {name}: the draft model's end tokens aren't the model's"
        raise ConfigError(f"{text}; a draft model must have the model's tokenizer", "speculation")
