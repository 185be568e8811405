"""The counts that a decode engine reports of its batch and of its drafts.

Knows nothing of the loop or of who shows them.
"""

from __future__ import annotations

import msgspec

from baton.decode_worker.engine.scheduler import DecodeScheduler
from baton.engine.speculate.drafter import Drafter
from baton.protos.channel import Stats


def load_of(scheduler: DecodeScheduler) -> tuple[int, int, int]:
    """Returns the number of sequences in the batch, of waiting ones, and of prompt tokens still to be computed."""
    running = scheduler.running
    prefilling = sum(d.sequence.pending for d in (*running, *scheduler.waiting) if d.prefilling)
    beyond = max(0, len(running) - scheduler.max_batch)
    return len(running) - beyond, len(scheduler.waiting) + beyond, prefilling


def with_drafts(found: Stats, drafter: Drafter | None) -> Stats:
    """Returns ``found`` with the counts of ``drafter``, or as it is if there is none."""
    if drafter is None:
        return found
    tally = drafter.tally
    return msgspec.structs.replace(
        found,
        drafts=tally.drafts,
        draft_tokens=tally.verified,
        draft_tokens_accepted=tally.accepted,
        draft_seconds=tally.seconds,
        speculation=drafter.totals,
    )
