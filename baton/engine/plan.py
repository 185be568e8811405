"""Defines what one engine step is asked to do and what it answers. Torch-free.

Knows nothing of schedulers, leases or models: a plan is tokens, positions and page tables. Nothing that it holds
leads back to it, so that the garbage collector needn't know of it (``gc=False``): a step makes two such objects for
each of its sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.packed import PackedAdapter
from baton.engine.masks import Allowed
from baton.protos.errors import RankLost
from baton.protos.nouns import EngineWork, KvLayout, Sampling, SharedPages, StepSample, TokenLogprobs


class DraftedToken(msgspec.Struct, frozen=True, gc=False):
    """Holds a draft that is judged by rejection, and the probabilities (vocab,) float32 that it was drawn by.

    ``spread`` None: as if it had been certain, which any draft may be taken for; fewer stand then.
    """

    token: int
    spread: NDArray[np.float32] | None = None


class SampleSpec(msgspec.Struct, frozen=True, gc=False):
    """Says how to choose the token that follows a step's last one.

    ``position`` is the new token's absolute position; randomness is keyed by (seed, choice, position). ``history``
    is every token before it, prompt first (borrowed, not copied: don't keep it past the step); behind a draft it is
    given only where the sampling is penalised. ``banned`` ids can't be chosen now (stop ids before ``min_tokens``,
    the end of a bad word). ``allowed`` gives the only ids that can (see ``masks.py``; it may raise), what is banned
    already left out. With ``drafted`` the token is the draft where rejection lets it stand, else one from what it
    leaves. ``spread``: the probabilities are wanted as well.
    """

    sampling: Sampling
    choice: int
    position: int
    history: Sequence[int]
    prompt_tokens: int
    banned: tuple[int, ...] = ()
    allowed: Allowed | None = None
    drafted: DraftedToken | None = None
    spread: bool = False

    @property
    def plain(self) -> bool:
        """Tells whether the likeliest token is the one, and nothing edits the logits or asks for them."""
        s = self.sampling
        asks = s.temperature or s.logprobs is not None or s.logit_bias or s.penalised
        return not (asks or self.banned or self.allowed is not None or self.spread)


class Limb(msgspec.Struct, frozen=True, gc=False):
    """Holds consecutive rows of an item that branch off: they follow row ``parent`` of it, not the row before.

    ``pages`` are theirs alone, from the block that holds the item's ``start`` on. The KV of what they follow is
    copied there in the step, so that to each row its own path is a plain text, read to the same bits.
    """

    parent: int
    first: int
    rows: int
    pages: Sequence[int]


class SequenceStep(msgspec.Struct, frozen=True, gc=False):
    """Describes one sequence's share of a step: compute ``tokens`` at positions ``start``, ``start + 1``, …

    ``pages[i]`` holds tokens 16 i … 16 i + 15 and the table covers ``start + len(tokens)`` tokens; the KV of tokens
    before ``start`` is already there. ``sample`` is None while a prompt's last chunk hasn't come. ``targets[i]``,
    the known token at ``start + i + 1``, is to be scored, with ``score_top`` alternatives. ``pool``: the last
    layer's normed hidden states are wanted too. ``verify``: the last tokens are drafts, as many as it has specs.
    ``sample`` then chooses the token that follows the last known one, and ``verify[i]`` the token that follows
    draft i. ``state_from``, of a model with recurrent state, are the pages with the state before ``start`` (None:
    no token is before it), ``state_to`` those that take the state after the last token; they never overlap.
    ``adapter`` is the id of the sequence's LoRA adapter, which the runner holds; empty for none. ``limbs`` are the
    last rows where drafts are a tree (``branches_of``): ``start + i`` is then the position of the rows before them,
    and ``verify[i]`` still chooses behind row i + 1.
    No token of the item sees the entries ``gap`` of ``pages``, from the first to the one before the second.
    ``watch`` is the place of a token of it, the first of a run: how much that one and those behind it attend to
    what is before them is wanted.
    """

    seq: int
    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sample: SampleSpec | None = None
    is_prefill: bool = False
    targets: Sequence[int] = ()
    score_top: int = 0
    pool: bool = False
    verify: tuple[SampleSpec, ...] = ()
    state_from: Sequence[int] | None = None
    state_to: Sequence[int] = ()
    adapter: str = ""
    limbs: tuple[Limb, ...] = ()
    gap: tuple[int, int] = (0, 0)
    watch: int | None = None

    @property
    def trunk(self) -> int:
        """Returns the number of rows that follow one another from ``start`` on."""
        return self.limbs[0].first if self.limbs else len(self.tokens)

    @property
    def asks(self) -> tuple[SampleSpec, ...]:
        """Returns how the tokens behind the item's last rows are chosen, one per row, in order."""
        return () if self.sample is None else (self.sample, *self.verify)

    @property
    def drafts(self) -> Sequence[int]:
        """Returns the drafted tokens among ``tokens``."""
        return self.tokens[len(self.tokens) - len(self.verify) :]

    def undrafted(self) -> SequenceStep:
        """Returns the same step without its drafts."""
        known = self.tokens[: len(self.tokens) - len(self.verify)]
        return msgspec.structs.replace(self, tokens=known, verify=(), limbs=())


class StepPlan(msgspec.Struct, frozen=True, gc=False):
    """Holds everything that one step computes. Sequences are independent of one another."""

    items: tuple[SequenceStep, ...]

    def shape(self, seconds: float = 0.0) -> StepSample:
        """Returns the plan's size in the terms of the cost curve, with the step's ``seconds``."""
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
        return StepSample(prefill_tokens, attention, decode, context, seconds, drafts)


class SampledToken(msgspec.Struct, frozen=True):
    """Holds the token that follows, its likelihood where logprobs were asked for, and all probabilities (vocab,)
    where the spec's ``spread`` asked for them.
    """

    seq: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    spread: NDArray[np.float32] | None = None


class PooledStates(msgspec.Struct, frozen=True):
    """Holds hidden states of an item's tokens, (hidden,): their sum in float64, and the last one in float32."""

    total: NDArray[np.float64]
    last: NDArray[np.float32]

    @classmethod
    def of(cls, states: NDArray[np.float32]) -> PooledStates:
        """Pools ``states`` (tokens, hidden) float32."""
        return cls(states.sum(0, dtype=np.float64), states[-1].copy())


class StepResult(msgspec.Struct, frozen=True):
    """Holds one entry per choice that the items ask for, in the plan's order. ``seconds`` is the forward pass
    alone.

    ``scored[seq]`` has the likelihood of each of its item's ``targets``, where there are any; ``pooled[seq]`` what
    its item's hidden states come to, where ``pool`` asks; ``states[seq]`` those of its last rows, where they are
    tapped; ``observed[seq]`` the attention that each run of 16 tokens before its ``watch`` gets, of all heads.
    """

    sampled: tuple[SampledToken, ...]
    seconds: float
    scored: dict[int, tuple[TokenLogprobs, ...]] = {}
    pooled: dict[int, PooledStates] = {}
    states: dict[int, NDArray[np.float32]] = {}
    observed: dict[int, NDArray[np.float32]] = {}


class ModelSpec(msgspec.Struct, frozen=True):
    """Holds what the rest of a worker must know of a loaded model."""

    fingerprint: str
    layout: KvLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    weight_bytes: int = 0  # of all weights, as they lie in memory; 0: unknown


class Mirror(Protocol):
    """Hears who writes to a runner's pages on a device, where these are open to the I/O process."""

    shared: SharedPages

    def opened(self, pages: Sequence[int]) -> None:
        """Reports that a handoff may write ``pages`` on the device from now on, until their lease ends."""

    def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        """Reports that ``blocks`` of ``seq`` lie on their pages of ``table``, on the device as on the host."""


def mirror_of(runner: Runner) -> Mirror | None:
    """Returns the runner's mirror, once it is bound; None for most runners."""
    found: Mirror | None = getattr(runner, "mirror", None)
    return found


class AdapterHost(Protocol):
    """Holds the adapters that a runner's steps may name. ``base`` says what one must fit."""

    base: AdapterBase

    def hold(self, adapter: str, packed: PackedAdapter) -> None:
        """Applies ``packed`` to sequences that name ``adapter``, from the next step on; its memory must stay."""

    def drop(self, adapter: str) -> None:
        """Forgets an adapter that no sequence names any more."""


def adapters_of(runner: Runner) -> AdapterHost | None:
    """Returns what holds the runner's adapters; None where it applies none."""
    found: AdapterHost | None = getattr(runner, "adapters", None)
    return found


class Ranks(Protocol):
    """The processes that share a runner's model, where it runs as several.

    ``dealt_experts`` are the experts that each rank has of every layer, as ranges; empty where they aren't dealt.
    """

    dealt_experts: tuple[tuple[int, int], ...]

    def expert_rows(self) -> tuple[int, ...]:
        """Returns the rows that went to each expert in all layers, ever; empty where experts aren't dealt."""

    def open_pages(self, fd: int, size: int) -> None:
        """Gives every rank the KV pages, ``size`` bytes of memory at descriptor ``fd``."""

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """Has ``lost`` called, from a thread of its own, when a rank's process is gone."""

    def leave(self) -> None:
        """Ends all ranks but this one."""


def ranks_of(runner: Runner) -> Ranks | None:
    """Returns the ranks of a runner that runs as several; None for most runners."""
    found: Ranks | None = getattr(runner, "ranks", None)
    return found


class Internals(Protocol):
    """Lets speculators use the inside of a runner's model: ``layers`` layers of ``hidden`` numbers a row."""

    layers: int
    hidden: int

    def tap(self, layers: Sequence[int], every_row: bool) -> None:
        """Has each step give the states before ``layers`` from now on (``StepResult.states``), side by side; behind
        the last layer they are those that the head reads. Of every row, or of those that choose a token.
        """

    def embeddings(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns (tokens, hidden) of the model's own table."""

    def shallow(self, layers: int) -> Runner:
        """Returns a runner of so many of the layers, on the same weights; 0: half of them. Raises ConfigError."""


def branches_of(runner: Runner) -> bool:
    """Returns whether a runner computes items with ``limbs``: trees of drafts."""
    return bool(getattr(runner, "branches", False))


def internals_of(runner: Runner) -> Internals | None:
    """Returns the inside of a runner's model; None for most runners."""
    found: Internals | None = getattr(runner, "internals", None)
    return found


class Runner(Protocol):
    """Computes steps: tokens + pages -> next tokens. The real one runs a model, the paced one sleeps and hashes.

    ``work`` says what its steps cost beside the machine's ceilings; None where nobody measured.
    """

    spec: ModelSpec
    work: EngineWork | None

    def bind(self, buffer: memoryview, pages: int) -> None:
        """Uses ``buffer`` (pages x layout.page_bytes bytes, shared with the I/O process) as the KV pages."""

    def run(self, plan: StepPlan) -> StepResult:
        """Computes a step. A sequence that can't be computed raises; nothing else of the step is lost."""
