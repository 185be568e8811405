"""Leases the pages of a request that a decode engine admits, for a prompt computed locally or received by a
handoff.

Knows nothing of leases' ids, of the batch or of the channel. Torch-free. If anything fails, nothing stays leased.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from baton.engine.plan import ModelSpec
from baton.engine.request_checks import blocks_for, holdable, holdable_of
from baton.engine.states import AttentionReach, SequenceStates, StateRules, opened
from baton.kv.layout import prefix
from baton.kv.layout.running import RunningScores
from baton.kv.layout.selection import PromptSelection, chosen_from, observed_of, prompt_selection_of
from baton.kv.layout.state import state_hashes
from baton.kv.pages.pool import PageLease, PagePool
from baton.kv.pages.tables import TablesLease
from baton.protos import channel as ch


class OpenedPages(NamedTuple):
    """The pages of an admitted request, and its block hashes."""

    root: bytes  # root of its hash chain
    hashes: list[bytes]  # including that of the partial last block
    pages: PageLease
    states: SequenceStates | None  # pages of recurrent state, if the model has one
    kept: PromptSelection | None = None  # which of the prompt's blocks are selected to be kept; None: all
    running: RunningScores | None = None  # scores by which its answer gives up pages; None: it keeps all

    def close(self) -> None:
        """Returns every page to the pool."""
        self.pages.close()
        if self.states is not None:
            self.states.close()

    def admitted(self, message: ch.Admit, lease_id: bytes) -> ch.Admitted:
        """Returns the message to the I/O process that assigns pages to blocks, those of a recurrent state last."""
        table, hashes = self.pages.pages, self.hashes
        slots = 0
        if isinstance(self.pages, TablesLease) and not message.local:
            table, hashes = self.pages.landing, [*hashes, *self.pages.landing_hashes(hashes)]
        if self.kept is not None and not message.local:
            slots, hashes = self.kept.slots, self.kept.named(hashes)
        if self.states is not None and not message.local:
            state = self.states.landing().pages
            table, hashes = [*table, *state], [*hashes, *state_hashes(hashes[-1], len(state))]
        at = self.pages.held, tuple(table), tuple(hashes), self.pages.gap
        return ch.Admitted(message.key, lease_id, 1, *at, slots)


def open_pages(
    message: ch.Admit, spec: ModelSpec, pool: PagePool, rules: StateRules | None, reserve: int
) -> OpenedPages:
    """Leases the pages that the request of ``message`` needs, leaving ``reserve`` free. Raises PoolExhausted."""
    request, size, reach = message.request, pool.block_tokens, AttentionReach.of(spec.layout, grows=True)
    root = prefix.root(spec.fingerprint, spec.layout.fidelity, request.adapter_id, request.tenant_salt)
    tokens, hashes = len(request.token_ids), prefix.chain(root, request.token_ids, size)
    prompt, observed = chosen_from(spec.layout, request, message.local), observed_of(spec.layout)
    kept = prompt_selection_of(spec.layout, prompt)
    running = RunningScores(observed, size, prompt, kept) if observed is not None and observed.running else None
    if kept is not None and not message.local:
        behind = hashes, kept.first, blocks_for(tokens, size), reserve
        return OpenedPages(root, hashes, pool.open_behind(*behind, sunk=kept.slots), None, kept, running)
    limit = holdable_of(request, tokens, size) if message.local else holdable(tokens, size)
    limit = limit if kept is None else min(limit, kept.first)
    limit = limit if running is None else min(limit, prompt // size)
    asked = hashes[: tokens // size], blocks_for(tokens, size), limit, reserve
    reach = reach if message.local else reach.behind(tokens, size)
    lease = partial(opened, pool, rules, *asked, brought=not message.local, reach=reach)
    return OpenedPages(root, hashes, *lease(), kept, running)  # one line: what is leased has an owner at once
