"""Declares what a runner may offer beside its steps: a mirror of its pages, ranks, asynchronous steps, internals.
Torch-free.

Knows nothing of backends. Each is an attribute that most runners lack; the function of its name returns None then.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from baton.engine.adapters.host import AdapterHost
from baton.engine.plan import Runner, StepPlan, StepResult
from baton.protos.channel import HostSender
from baton.protos.errors import RankLost
from baton.protos.measurements import ExpertRows, SharedPages
from baton.protos.nouns import KvLayout


class Mirror(Protocol):
    """Is told about writes to a runner's KV pages on its device, if another process may write them, or on other
    hosts of its ranks; ``shared`` names the memory of a device's pages, None of hosts'.
    """

    shared: SharedPages | None

    def opened(self, pages: Sequence[int]) -> None:
        """Reports that a handoff may write ``pages`` on the device from now on, until their lease ends."""

    def landed(self, seq: int, table: Sequence[int], blocks: Sequence[int]) -> None:
        """Reports that the blocks at indices ``blocks`` of page table ``table`` of sequence ``seq`` now have their
        KV, on the device and on the host; or each host of ranks its part of it.
        """

    def taken(self, pages: Sequence[int]) -> None:
        """Reports that ``pages`` were leased anew: what was in them counts no more."""

    def make_whole(self, pages: Sequence[int]) -> None:
        """Brings what other hosts or a card have of ``pages`` to the host's pages, before anybody but steps reads
        them; they stay there until ``let_go``. Raises RankLost, and another BatonError with nothing changed.
        """

    def lend(self, pages: Sequence[int]) -> None:
        """Copies to each other host its part of ``pages``, which hold recurrent state and are right on the lead's
        host alone, so that each can be sent from there. Raises BatonError.
        """

    def let_go(self, pages: Sequence[int]) -> None:
        """Reports that whoever had ``pages`` made whole reads them no more, once for each time."""


def mirror_of(runner: Runner) -> Mirror | None:
    """Returns the runner's mirror once pages are bound; None for runners whose pages no other process writes on a
    device.
    """
    found: Mirror | None = getattr(runner, "mirror", None)
    return found


def copies_left(mirror: Mirror | None) -> int | None:
    """Returns how many pages more can be made whole while the host's memory holds what it needs of the others; None
    where it has room for every page.
    """
    found: int | None = getattr(mirror, "copies_left", None)
    return found


def freed_of(mirror: Mirror) -> Callable[[Sequence[int]], None] | None:
    """Returns what wants to hear of pages that nobody has any more; None for most mirrors."""
    found: Callable[[Sequence[int]], None] | None = getattr(mirror, "freed", None)
    return found


class AsyncSteps(Protocol):
    """Runs a runner's steps beside its caller, in the order in which they were submitted. At most two are under way
    at a time, from ``submit`` to ``collect``; meanwhile ``Runner.run`` may not be called.
    """

    def submit(self, plan: StepPlan, fed: Collection[int] = ()) -> None:
        """Begins the step ``plan``, whose pages must stay leased until its ``collect``, and returns. In place of
        the one token of each sequence of ``fed`` it takes the one that the step before chooses. Raises if it can't
        be begun; those before it go on.
        """

    def collect(self) -> StepResult:
        """Returns the results of the oldest step, once they are there, with the seconds since it was submitted or
        the one before it ended. Raises if it failed; it isn't under way any more.
        """


def async_steps_of(runner: Runner) -> AsyncSteps | None:
    """Returns the runner's asynchronous steps; None for runners that compute in the caller's thread alone."""
    found: AsyncSteps | None = getattr(runner, "async_steps", None)
    return found


def demand_of(runner: Runner) -> Callable[[int], None] | None:
    """Returns how to tell a runner, before its pages are bound, to copy KV from its card to the host's pages when
    somebody wants to read it, and how many bytes of copies may stay; None for runners that need every page on the
    host.
    """
    found: Callable[[int], None] | None = getattr(runner, "on_demand", None)
    return found


def warm(runner: Runner, sequences: int, chunk: int, drafts: int = 0) -> None:
    """Lets ``runner`` prepare for steps of up to ``sequences`` decodes, ``drafts`` drafts of theirs and ``chunk``
    tokens of a prompt, once pages are bound and before any is leased. Does nothing for runners that needn't. Raises
    ConfigError.
    """
    prepare: Callable[[int, int, int], None] | None = getattr(runner, "warm", None)
    if prepare is not None:
        prepare(sequences, chunk, drafts)


def adapters_of(runner: Runner) -> AdapterHost | None:
    """Returns the holder of the runner's adapters; None if it applies none."""
    found: AdapterHost | None = getattr(runner, "adapters", None)
    return found


class Ranks(Protocol):
    """Controls the processes that share a runner's model."""

    def expert_rows(self) -> ExpertRows | None:
        """Returns the rows that experts computed in all layers since the start; None if experts aren't divided
        among ranks.
        """

    def open_pages(self, fd: int, size: int, layout: KvLayout | None = None) -> None:
        """Maps the KV pages, ``size`` bytes of shared memory at descriptor ``fd``, into every rank. With their
        ``layout`` each host gets a KV sender for its part of every page.
        """

    @property
    def senders(self) -> tuple[HostSender, ...]:
        """Returns the hosts that each send a part of every page, the lead's first; () if it sends all, as before
        ``open_pages``. Their copies of cached pages are current after the step that reads them.
        """

    @property
    def receivers(self) -> tuple[HostSender, ...]:
        """Returns the hosts that each receive what they read of every page, the lead's first; () if it receives
        all. The runner's ``mirror`` is told of such pages.
        """

    def watch(self, lost: Callable[[RankLost], None]) -> None:
        """Has ``lost`` called, from a thread of its own, when a rank's process has died."""

    def leave(self) -> None:
        """Ends the processes of all ranks but this one."""


def ranks_of(runner: Runner) -> Ranks | None:
    """Returns the ranks of a runner that runs as several processes; None for most runners."""
    found: Ranks | None = getattr(runner, "ranks", None)
    return found


class Internals(Protocol):
    """Gives speculators access to a runner's model of ``layers`` layers, whose hidden states have ``hidden``
    numbers.
    """

    layers: int
    hidden: int

    def tap(self, layers: Sequence[int], every_row: bool) -> None:
        """Has each later step return the hidden states before ``layers``, side by side in each row
        (``StepResult.states``).

        Number ``self.layers`` stands for the states that the head reads. ``every_row`` returns all rows, otherwise
        only those that choose a token are returned.
        """

    def embeddings(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Returns the rows (tokens, hidden) of the model's embedding table for ``tokens``."""

    def shallow(self, layers: int) -> Runner:
        """Returns a runner of ``layers`` of the model's layers on the same weights, of half of them for 0. Raises
        ConfigError if that can't be done.
        """


def branches_of(runner: Runner) -> bool:
    """Returns whether a runner computes items with ``draft_branches``, i.e. trees of drafts."""
    return bool(getattr(runner, "branches", False))


def keeps_bits(runner: Runner) -> bool:
    """Returns whether the results of a row never depend on the step's other rows, so that drafts change no bit."""
    return bool(getattr(runner, "keeps_bits", False))


def internals_of(runner: Runner) -> Internals | None:
    """Returns the access to the inside of a runner's model; None for most runners."""
    found: Internals | None = getattr(runner, "internals", None)
    return found
