"""Defines the input and output of one engine step. Torch-free.

Knows nothing of schedulers, leases or models: a plan is tokens, positions and page tables. No object that a plan
refers to refers back to it, so that the garbage collector needn't track it (``gc=False``): a step makes two such
objects for each of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.masks import Allowed
from baton.protos.measurements import AdapterRowCounts, EngineWork, StepSample
from baton.protos.nouns import KvLayout, Sampling, TokenLogprobs


class DraftedToken(msgspec.Struct, frozen=True, gc=False):
    """Holds a drafted token that is accepted or rejected by rejection sampling, and the probabilities it was drawn
    with.

    ``spread`` is (vocab,) float32; None if the draft was chosen with certainty. None is valid for any draft, but
    then fewer are accepted.
    """

    token: int
    spread: NDArray[np.float32] | None = None


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """Says how to choose the token that follows a row of a step.

    ``position`` is the new token's absolute position; randomness is keyed by (seed, choice, position). ``history``
    is every token before it, prompt first (borrowed: don't keep it past the step); after a draft it is given only
    if the sampling has penalties. ``banned`` ids can't be chosen now (stop ids before ``min_tokens``, the last id
    of a bad word). ``allowed`` gives the only ids that can (see ``masks.py``; it may raise), with the banned ones
    already removed.
    """

    sampling: Sampling
    choice: int  # index of the answer among the request's choices
    position: int
    history: Sequence[int]
    prompt_tokens: int  # length of the prompt at the beginning of ``history``
    banned: tuple[int, ...] = ()
    allowed: Allowed | None = None
    drafted: DraftedToken | None = None  # chosen if rejection sampling accepts it, else another is drawn
    spread: bool = False  # the probabilities are to be returned as well

    @property
    def plain(self) -> bool:
        """Returns whether this is plain greedy decoding: the likeliest token, without edits of the logits, logprobs
        or probabilities.
        """
        s = self.sampling
        asks = s.temperature or s.logprobs is not None or s.logit_bias or s.penalised
        return not (asks or self.banned or self.allowed is not None or self.spread)


class DraftBranch(msgspec.Struct, frozen=True, gc=False):
    """Describes a branch of a tree of drafts: consecutive rows of an item that follow row ``parent``, not the row
    before them.

    ``pages`` belong to the branch alone and begin with the block that holds the item's ``start``. The step copies
    the KV that the branch follows into them, so that attention reads each branch as an ordinary sequence, with the
    same bits.
    """

    parent: int  # row of the item that the branch follows
    first: int  # the branch's first row in the item
    rows: int  # number of rows
    pages: Sequence[int]


class SequenceStep(msgspec.Struct, frozen=True, gc=False):
    """Describes one sequence's share of a step: compute ``tokens`` at positions ``start``, ``start + 1``, …

    ``pages[i]`` holds tokens 16 i … 16 i + 15 and the table covers ``start + len(tokens)`` tokens; the KV of tokens
    before ``start`` is already there. ``sample`` says how to choose the next token, None for a part of a prompt
    that isn't its end. ``targets[i]``, the known token at ``start + i + 1``, is to be scored, with ``score_top``
    alternatives. ``verify`` marks the last tokens as drafts, one per entry: ``sample`` then chooses the token after
    the last known one, and ``verify[i]`` the token after draft i. ``draft_branches`` are the branches if drafts
    form a tree (``branches_of``): ``start + i`` is then the position of token i only before the first branch.

    ``state_from`` are the pages with the recurrent state before ``start`` (None: there is no token before it),
    ``state_to`` the pages for the state after the last token; they never overlap. Entries ``gap[0]`` … ``gap[1] -
    1`` of ``pages`` are skipped by attention. ``watch`` is the position of one of the tokens: how much attention it
    and the tokens after it pay to what is before them is to be returned (``StepResult.observed``); with
    ``watch_rows``, what each of them pays to all that it sees. ``tables`` are the further page tables of a layout
    with ``windows``, like ``pages``: those of its second page per block, its third, …
    """

    seq: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: SampleSpec | None = None
    is_prefill: bool = False  # ``StepPlan.shape`` counts its tokens as a prompt's
    targets: Sequence[int] = ()
    score_top: int = 0
    pool: bool = False  # return the last layer's normed hidden states, pooled
    verify: tuple[SampleSpec, ...] = ()
    state_from: Sequence[int] | None = None
    state_to: Sequence[int] = ()
    adapter: str = ""  # id of a LoRA adapter that the runner holds; empty for none
    draft_branches: tuple[DraftBranch, ...] = ()
    gap: tuple[int, int] = (0, 0)
    watch: int | None = None
    watch_rows: bool = False
    tables: tuple[Sequence[int], ...] = ()

    @property
    def trunk(self) -> int:
        """Returns the number of rows that follow one another from ``start`` on, before any branch."""
        return self.draft_branches[0].first if self.draft_branches else len(self.tokens)

    @property
    def asks(self) -> tuple[SampleSpec, ...]:
        """Returns how to choose the tokens that follow the item's last rows, one entry per row, in order; empty
        without ``sample``.
        """
        return () if self.sample is None else (self.sample, *self.verify)

    @property
    def drafts(self) -> Sequence[int]:
        """Returns the drafted tokens, the last of ``tokens``."""
        return self.tokens[len(self.tokens) - len(self.verify) :]

    def undrafted(self) -> SequenceStep:
        """Returns the same step without its drafts."""
        known = self.tokens[: len(self.tokens) - len(self.verify)]
        return msgspec.structs.replace(self, tokens=known, verify=(), draft_branches=())


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """Holds everything that one step computes. Sequences are independent of one another."""

    items: tuple[SequenceStep, ...]

    def shape(self, seconds: float = 0.0, rank_of: Callable[[str], int] | None = None) -> StepSample:
        """Returns the plan's token, context and draft counts as the cost curve takes them, with the step's duration
        ``seconds``.

        ``rank_of`` gives an adapter's rank; without it rows on adapters aren't counted.
        """
        prefill_tokens = decode = context = drafts = 0
        attention = 0.0
        for item in self.items:
            count = len(item.tokens)
            if item.is_prefill:
                prefill_tokens += count
                attention += count * (item.start + count / 2)
            else:
                decode += 1
                context += item.start + count
                drafts += len(item.verify)
        adapted = None if rank_of is None else self._adapted(rank_of)
        return StepSample(prefill_tokens, attention, decode, context, seconds, drafts, adapted)

    def _adapted(self, rank_of: Callable[[str], int]) -> AdapterRowCounts | None:
        rows: dict[str, int] = {}
        for item in self.items:
            if item.adapter:
                rows[item.adapter] = rows.get(item.adapter, 0) + len(item.tokens)
        if not rows:
            return None
        ranks = {adapter: rank_of(adapter) for adapter in rows}
        row_ranks = sum(count * ranks[adapter] for adapter, count in rows.items())
        return AdapterRowCounts(sum(rows.values()), row_ranks, len(rows), sum(ranks.values()))


class SampledToken(msgspec.Struct, frozen=True):
    """Holds a chosen token of sequence ``seq``, its logprobs if requested, and all probabilities (vocab,) float32
    if the spec's ``spread`` asked for them.
    """

    seq: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    spread: NDArray[np.float32] | None = None


# Prompt tokens of a step that get logprobs, because each row's logits take the vocabulary in float32. Of 150,000
# tokens these are 77 MB, which a card takes before traffic. Only a window of a prompt's selecting tokens
# (kv/layout/selection.py) may be longer; it then has a step's rows to itself.
MOST_SCORED = 128


class PooledStates(msgspec.Struct, frozen=True):
    """Holds pooled hidden states of an item's tokens."""

    total: NDArray[np.float64]  # (hidden,): the sum over tokens
    last: NDArray[np.float32]  # (hidden,): the last token's

    @classmethod
    def of(cls, states: NDArray[np.float32]) -> PooledStates:
        """Returns the sum and the last row of ``states`` (tokens, hidden)."""
        return cls(states.sum(0, dtype=np.float64), states[-1].copy())


class StepResult(msgspec.Struct, frozen=True):
    """Holds the results of a step: ``sampled`` has one entry per choice that the items ask for, in the plan's
    order.

    The dicts are keyed by sequence and have entries only for items that asked: ``scored``, the logprobs of the
    item's ``targets``; ``pooled``, its pooled hidden states (``pool``); ``states``, (rows, layers x hidden)
    float32, the hidden states of its last rows if these are tapped (``Internals.tap``); ``observed``, float32, the
    attention that each run of 16 tokens before ``watch`` got, summed over heads and layers; with ``watch_rows``
    (tokens, runs), what each token from ``watch`` on paid to each run that it sees, its own included.
    """

    sampled: tuple[SampledToken, ...]
    seconds: float  # of the forward pass alone
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    pooled: dict[int, PooledStates] = {}
    states: dict[int, NDArray[np.float32]] = {}
    observed: dict[int, NDArray[np.float32]] = {}


class ModelSpec(msgspec.Struct, frozen=True):
    """Holds the properties of a loaded model that the rest of a worker needs."""

    fingerprint: str  # hex SHA-256 of the weights
    layout: KvLayout  # of a KV page
    max_model_len: int  # tokens of context
    vocab_size: int  # number of token ids that may be chosen
    eos_token_ids: tuple[int, ...]
    weight_bytes: int = 0  # bytes of all weights in memory; 0: unknown


class Runner(Protocol):
    """Computes steps: writes the KV of given tokens to pages and returns the next tokens.

    The real one runs a model, the paced one sleeps and hashes. ``work`` holds the cost of its steps and the
    machine's peak rates; None if they weren't measured.
    """

    spec: ModelSpec
    work: EngineWork | None

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` (pages x layout.page_bytes bytes, shared with the I/O process) as the KV pages."""

    def run(self, plan: StepPlan) -> StepResult:
        """Computes the step ``plan`` and returns its results. Raises if any sequence can't be computed; the step
        may then be repeated without that one.
        """
