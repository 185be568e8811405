"""Runs speculation for one worker: asks speculators, weighs chances against costs, and learns from each step.

Knows nothing of pages, plans or channels. Durations of steps are passed in; it measures only its own calls.
Torch-free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton.engine.speculate.acceptance import AcceptanceEstimate
from baton.engine.speculate.allowance import Allowance, Stake
from baton.engine.speculate.call_estimate import CallEstimate
from baton.engine.speculate.comparison import Comparison, Places, Tally
from baton.engine.speculate.depth import best_depths, lengthened
from baton.engine.speculate.draft import (
    MOST_DRAFTS,
    BatchSpeculator,
    Draft,
    LearningSpeculator,
    SequenceView,
    Speculator,
    States,
    StateSpeculator,
)
from baton.engine.speculate.draft_model import DraftModel
from baton.engine.speculate.judge import MOST_ROWS, DraftJudge, WeighedDraft, Writer
from baton.engine.speculate.probe import Probe
from baton.engine.speculate.proposals import Proposals
from baton.engine.speculate.row_cost import RowCost, Vector
from baton.protos.measurements import SpeculationTotals

WATCHED = 8  # of so many steps without speculation one is timed, because the machine's speed drifts slowly
# Share by which drafts lengthen a step at most if some of its sequences gain nothing by them.
MOST_FOR_OTHERS = 0.25
MOST_ENDED = 16  # ended answers that wait to be forgotten, which takes a time that a single step shouldn't have
LOOKED_BACK = 0.5  # share by which looking back lengthens a step, which it does once in 500: 0.1% of the time
MOST_LOOKS_APART = 8  # calls between two that look back, doubled to this while drafts bring nothing
FIRST_PLACE = 0.5  # of a call's time for a place that is looked back on, until it is known
PLACE_NEW = 0.3  # weight of the last time per place that was looked back on
PROMPT_NEW = 0.1  # weight of a step's time per prompt token


class Drafter:
    """Decides what to draft: call ``plan`` before a step; after it ``observe`` with its duration, and ``judge`` for
    each verified draft.

    A share ``control_share`` of the steps drafts nothing, for comparison. ``by_rejection`` verifies drafts of
    sampled answers by rejection sampling: tokens have the target's distribution, but differ from those of a run
    without drafts. ``trees`` allows tree drafts, which the runner must support.
    """

    def __init__(
        self,
        speculators: Sequence[Speculator],
        clock: Callable[[], float] = time.perf_counter,
        control_share: float = 0.0,
        by_rejection: bool = False,
        trees: bool = False,
    ) -> None:
        self.by_rejection = by_rejection
        for speculator in speculators:
            speculator.branches = trees
            if isinstance(speculator, DraftModel):
                speculator.spreads = by_rejection
        self.tally = Tally()
        self._places = Places()
        self._comparison = Comparison(control_share)
        self._speculators, self._clock = speculators, clock
        self._learning = [one for one in speculators if isinstance(one, LearningSpeculator)]
        self._seeing = [one for one in speculators if isinstance(one, StateSpeculator)]
        self._chances, self._costs = AcceptanceEstimate(), RowCost()
        self._proposals = Proposals(speculators, self._chances, trees, by_rejection)
        # What look-ups are worth is seen without verifying them; what models draft takes too long for that.
        models = LearningSpeculator, BatchSpeculator
        self._models = any(isinstance(one, models) for one in speculators)
        self._tries = by_rejection or self._models
        self._asking, self._probe, self._allowance = CallEstimate(), Probe(), Allowance(self._tries)
        self._judge = DraftJudge(self._chances, self._costs, self._asking, self._allowance)
        self._staked: Stake | None = None  # of the last step, if it had drafts
        self._ended: dict[int, SequenceView] = {}  # texts that are still to be forgotten
        self._gone: list[int] = []  # sequences that were forgotten before their last step is settled
        self._prompt_token_s = 0.0
        self._looks_apart = self._look_wait = 1  # calls between two that look back, and until the next one
        self._looks: bool | None = None  # whether the present step looks back, once that is decided
        self._looked_back_s = self._place_s = 0.0  # in the present step; estimated for one place, once known
        self._probed: int | None = None
        self._sequence_steps, self._read_ahead = 0, 0  # steps of sequences that wrote; prompts' tokens read early
        self._rest, self._rested = 0, 0  # steps that nobody need be thought about, and those since somebody was
        self._resting: tuple[int, int, int] | None = None  # whose rest it is

    def plan(self, writers: Sequence[Writer], prompt_tokens: int = 0, limit_s: float = 0.0) -> dict[int, Draft]:
        """Returns the drafts to verify in the next step, by sequence number; often none.

        ``prompt_tokens`` are computed in the same step, which shouldn't take more than ``limit_s`` seconds (0: no
        limit).
        """
        is_control, count = self._comparison.begin(), len(writers)
        self._sequence_steps += count
        self._settle()
        if is_control or not writers or self._rests(writers):
            self._comparison.add(count, 0.0)
            return {}
        began, self._looked_back_s, self._looks = self._clock(), 0.0, None
        asked, found = self._planned(writers, prompt_tokens, limit_s)
        rest = self._asking.rest()
        soon = bool(asked) or self._judge.is_watching  # a verdict over what they draft is soon due
        self._rest = min(rest, MOST_DRAFTS - 1) if soon else rest  # looks at kept drafts are felt, too
        self._rested, took, looked_back_s = 0, self._clock() - began, self._looked_back_s
        self._comparison.add(count, took)
        self.tally = self.tally._replace(seconds=self.tally.seconds + took)
        if asked:
            self._asking.took(asked, took - looked_back_s)  # thinking about whom to ask is part of its price
        return found

    def _rests(self, writers: Sequence[Writer]) -> bool:
        """Returns whether it is known beforehand that no sequence would be asked, so that such a step costs next to
        nothing.
        """
        who = len(writers), writers[0].seq, writers[-1].seq
        if self._rest > 0 and who == self._resting:
            self._rest, self._rested = self._rest - 1, self._rested + 1
            return True
        self._resting = who
        return False

    def _planned(
        self, writers: Sequence[Writer], prompt_tokens: int, limit_s: float
    ) -> tuple[int, dict[int, Draft]]:
        """Returns how many sequences were asked, and the drafts that are worth verifying."""
        steps, count = self._rested + 1, len(writers)
        able = [writer for writer in writers if writer.draft_room > 0]
        if not able or not self._costs.known:
            return 0, {}
        if self._ended.keys() & {writer.seq for writer in able}:
            self._forget_ended()
        prompt_s = prompt_tokens * self._prompt_token_s
        self._allowance.save(steps)
        for text in able:
            self._judge.learn(text)
        step_s, promising = self._costs.of(count) + prompt_s, self._allowance.is_promising
        asked = self._asking.chosen(able, step_s, steps, self._hopeful(able), promising)
        if asked:
            self._forget_ended()
        opened = [text for text in asked if self._is_open(text.seq)]
        if not opened:
            return 0, {}
        if not self._verifies:
            self._keep(opened, count)
            return len(opened), {}
        seconds = self._costs.seconds(count, min(MOST_ROWS, self._costs.reach(count) - count)) + prompt_s
        weighed = self._proposals.weighed(opened, seconds, count)
        for text in () if self._tries else opened:
            self._look_back(text, count)
        return len(opened), self._worthy(weighed, opened, writers, seconds, limit_s, steps)

    @property
    def _verifies(self) -> bool:
        """Returns whether drafts may be verified now; if not, they are compared with what is written."""
        return self._tries or self._allowance.is_proven

    def _keep(self, texts: Sequence[Writer], count: int) -> None:
        """Keeps a draft of each of ``texts``, to compare it with what is written."""
        for text in texts:
            drafts = self._proposals.of(text)
            self._look_back(text, count)
            if not drafts:
                self._asking.brought(text.seq, 0)
                continue
            self._judge.keep(text, self._proposals.likeliest(text.seq, drafts), count)
            self.tally = self.tally._replace(proposed=self.tally.proposed + 1)

    def _look_back(self, text: Writer, count: int) -> None:
        """Judges what drafts of ``text`` would have brought so far, if calls are felt and few; this lengthens such
        a step by LOOKED_BACK at most.
        """
        left_s = LOOKED_BACK * self._costs.of(count) - self._looked_back_s
        place_s = self._place_s or FIRST_PLACE * self._asking.call_s
        if not self._asking.is_felt or left_s < place_s:
            return
        if self._looks is None:
            self._looks = not self._skips_look()
        if not self._looks:
            return
        began = self._clock()
        made = self._judge.look_back(text, self._likeliest, count, int(left_s / place_s))
        took = self._clock() - began
        self._looked_back_s += took
        if made:
            self._place_s = place_s + PLACE_NEW * (took / made - place_s)

    def _skips_look(self) -> bool:
        """Counts a call that may look back; returns whether it shouldn't, because the last ones found nothing."""
        if self._allowance.is_promising:
            self._looks_apart = self._look_wait = 1
        self._look_wait -= 1
        if self._look_wait > 0:
            return True
        self._looks_apart = self._look_wait = min(MOST_LOOKS_APART, 2 * self._looks_apart)
        return False

    def _likeliest(self, text: Writer) -> Draft | None:
        drafts = self._proposals.of(text)
        return self._proposals.likeliest(text.seq, drafts) if drafts else None

    def _worthy(
        self,
        weighed: Sequence[WeighedDraft],
        opened: Sequence[Writer],
        writers: Sequence[Writer],
        seconds: Vector,
        limit_s: float,
        steps: int,
    ) -> dict[int, Draft]:
        """Returns the drafts that are worth verifying, each as deep as pays; the others are kept to be judged."""
        depths = self._depths(weighed, writers, seconds, limit_s)
        self._add_probe(weighed, depths, steps, seconds)
        if any(depths):
            self._staked = Stake(len(writers), seconds)
        waiting = self._keep_rest(weighed, depths, seconds, len(writers))
        chosen = {
            one.text.seq: one.draft.of(one.order[:depth])
            for one, depth in zip(weighed, depths, strict=True)
            if depth
        }
        for text in opened:
            if text.seq not in chosen and text.seq not in waiting:
                self._asking.brought(text.seq, 0)
        self.tally = self.tally._replace(proposed=self.tally.proposed + len(weighed))
        return chosen

    def _hopeful(self, texts: Sequence[Writer]) -> Sequence[Writer]:
        """Returns the sequences to ask if enough is expected of them: all where drafts pay, else those whose own
        did or whose client predicts the answer.
        """
        if self._verifies:
            return texts
        return [text for text in texts if self._allowance.hopes(text.seq) or text.request.prediction]

    def _is_open(self, seq: int) -> bool:
        """Returns whether a further draft of the sequence ``seq`` is of use while one may be watched."""
        return self._verifies or seq not in self._judge

    def _depths(
        self, weighed: Sequence[WeighedDraft], writers: Sequence[Writer], seconds: Vector, limit_s: float
    ) -> list[int]:
        """Returns how many tokens of each draft to verify: none unless drafts have paid, nor of sequences whose own
        haven't; for their sake, others' are fewer.
        """
        depths = best_depths([one.chances for one in weighed], len(writers), seconds, limit_s)
        if not any(depths) or not self._allowance.allows(lengthened(seconds, sum(depths))):
            return [0] * len(depths)
        others = {text.seq for text in writers if not self._is_trusted(text)}
        if not others:
            return depths
        chances = [() if one.text.seq in others else one.chances for one in weighed]
        shared_s = (1.0 + MOST_FOR_OTHERS) * float(seconds[0])
        return best_depths(chances, len(writers), seconds, min(limit_s, shared_s) if limit_s else shared_s)

    def _is_trusted(self, text: Writer) -> bool:
        """Returns whether the sequence's drafts have paid, or the watched one agrees with what was written."""
        return self._allowance.trusts(text.seq) or self._judge.agrees(text.seq, len(text.tokens))

    def _keep_rest(
        self, weighed: Sequence[WeighedDraft], depths: Sequence[int], seconds: Vector, count: int
    ) -> set[int]:
        """Keeps what isn't verified of the drafts; by rejection, drafts of sampled answers may stand where they
        aren't what the target draws by itself, so they can't be judged.
        """
        if not self.by_rejection:
            return self._judge.keep_rest(weighed, depths, seconds, count)
        judged = [at for at, one in enumerate(weighed) if not one.text.request.sampling.temperature]
        kept = [weighed[at] for at in judged], [depths[at] for at in judged]
        return self._judge.keep_rest(*kept, seconds, count)

    def observe(self, rows: int, prompt_tokens: int, seconds: float) -> None:
        """Records a step of ``seconds`` that computed ``rows`` rows of answers, drafts included, and
        ``prompt_tokens``.
        """
        if rows:
            self._comparison.add(0, seconds)
        if self._rest % WATCHED and not prompt_tokens:
            return
        if not prompt_tokens:
            self._costs.observe(rows, seconds)
        elif self._costs.known:
            alone = float(self._costs.seconds(rows, 0)[0]) if rows else 0.0
            each = max(0.0, seconds - alone) / prompt_tokens
            self._prompt_token_s += PROMPT_NEW * (each - self._prompt_token_s)

    def read_prompt(self, text: SequenceView, idle: bool) -> int:
        """Lets speculators process the prompt of a text whose KV is still on its way; returns the tokens
        processed.
        """
        if text.seq in self._ended:
            self._forget_ended()
        count = sum(speculator.read_prompt(text, idle) for speculator in self._speculators)
        self._read_ahead += count
        return count

    def saw(self, text: SequenceView, first: int, states: States) -> None:
        """Passes the target's hidden states of positions ``first``, ``first`` + 1, … to speculators; rejected
        drafts' are left out.
        """
        if text.request.sampling.max_drafts == 0:
            return
        began = self._clock()
        for speculator in self._seeing:
            speculator.saw(text, first, states)
        took = self._clock() - began
        self._comparison.add(0, took)
        self.tally = self.tally._replace(seconds=self.tally.seconds + took)

    def judge(
        self, text: SequenceView, draft: Draft, accepted: int, chosen: Sequence[int] = (), rows: Sequence[int] = ()
    ) -> None:
        """Records that the target accepted ``accepted`` of the draft's tokens, all of which were verified; of a
        chain the first ones.

        ``chosen[row]`` is the target's token after each row of the step; of a tree, ``rows`` are the accepted rows
        (``tree.walked``).
        """
        seq = text.seq
        self._comparison.add(accepted, 0.0)
        if self._staked is not None:
            self._staked = self._staked.judged(seq, len(draft.tokens), accepted)
        self._places.add(draft, accepted, rows)
        self._judge.verified(seq, len(text.tokens) + accepted + 1)
        tried, answers = draft.tokens, chosen
        if draft.parents:
            tried, answers = [draft.tokens[row - 1] for row in rows[1:]], [chosen[row] for row in rows]
        for speculator in self._learning:
            speculator.verified(text, tried, answers)
        self._chances.judge(seq, draft, accepted, rows)
        self._asking.brought(seq, accepted)
        if self._probed == seq:
            self._probe.made(accepted == len(draft.tokens) if not draft.parents else accepted > 0)
            self._probed = None
        self.tally = self.tally.verified_one(len(draft.tokens), accepted)

    @property
    def totals(self) -> SpeculationTotals:
        """Returns the figures for operators: acceptance by place in the draft, and tokens and seconds with drafts
        and without.
        """
        arms = self._comparison.drafts, self._comparison.control
        return SpeculationTotals(
            self._sequence_steps,
            tuple(self._places.judged),
            tuple(self._places.stood),
            (arms[0].tokens, arms[1].tokens),
            (arms[0].seconds, arms[1].seconds),
            self._read_ahead,
        )

    def end(self, text: SequenceView) -> None:
        """Forgets a sequence that ended at the next call for drafts, or at once if speculators hold pages for it;
        speculators may learn from it.
        """
        self._judge.learn(text, is_last=True)
        self._ended[text.seq] = text
        if self._models or len(self._ended) > MOST_ENDED:
            self._forget_ended()

    def _forget_ended(self) -> None:
        ended, self._ended = self._ended, {}
        for text in ended.values():
            self._chances.end(text.seq)
            self._asking.end(text.seq)
            self._allowance.end(text.seq)
            if self._staked is not None:
                self._gone.append(text.seq)
            for speculator in self._speculators:
                speculator.end(text)

    def _settle(self) -> None:
        """Settles what the last step's drafts brought, as far as they were verified."""
        staked, self._staked = self._staked, None
        if staked is not None:
            staked.settle(self._allowance)
        while self._gone:
            self._allowance.end(self._gone.pop())

    def _add_probe(self, weighed: Sequence[WeighedDraft], depths: list[int], steps: int, seconds: Vector) -> None:
        """Lengthens the most promising draft by one token if a probe is due and may be risked."""
        due = self._tries and (self._probe.due(steps) or (self._allowance.is_new and not any(depths)))
        if not due or not self._allowance.allows(lengthened(seconds, sum(depths) + 1)):
            return
        left = [
            (one.chances[depth] if depth < len(one.chances) else 0.0, at)
            for at, (one, depth) in enumerate(zip(weighed, depths, strict=True))
            if depth < len(one.draft.tokens)
        ]
        if left:
            _, at = max(left)
            depths[at] += 1
            self._probed = weighed[at].text.seq
            self._probe.begun()
