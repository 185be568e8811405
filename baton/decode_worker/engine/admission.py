"""Opens the pages of a request that a decode engine admits, for a prompt read here or brought by a handoff.

Knows nothing of leases' ids, of the batch or of the channel. Torch-free. Whatever fails, nothing stays leased.
"""

from __future__ import annotations

from typing import NamedTuple

from baton.engine.checks import blocks_for, holdable, holdable_of
from baton.engine.plan import ModelSpec
from baton.engine.states import SequenceStates, Sight, StateRules, opened
from baton.kv.layout import prefix
from baton.kv.layout.selection import KeptPrompt, kept_of
from baton.kv.layout.state import state_hashes
from baton.kv.pages.pool import PageLease, PagePool
from baton.protos import channel as ch


class OpenedPages(NamedTuple):
    """Holds the pages of an admitted request, of a model with state also those of its states, and its hashes.

    ``root`` begins its chain; ``hashes`` covers the partial tail too. ``kept`` says what its tokens choose of the
    prompt, None where they keep all.
    """

    root: bytes
    hashes: list[bytes]
    pages: PageLease
    states: SequenceStates | None
    kept: KeptPrompt | None = None

    def close(self) -> None:
        """Gives every page back."""
        self.pages.close()
        if self.states is not None:
            self.states.close()

    def admitted(self, message: ch.Admit, lease_id: bytes) -> ch.Admitted:
        """Returns what the I/O process is told: which page takes which block, those of a state behind."""
        table, hashes = self.pages.pages, self.hashes
        slots = 0
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
    """Leases what the request of ``message`` needs, leaving ``reserve`` pages. Raises PoolExhausted."""
    request, size, sight = message.request, pool.block_tokens, Sight.of(spec.layout)
    root = prefix.root(spec.fingerprint, spec.layout.fidelity, request.adapter_id, request.tenant_salt)
    tokens, hashes = len(request.token_ids), prefix.chain(root, request.token_ids, size)
    kept = kept_of(spec.layout, request.prompt_tokens)
    if kept is not None and not message.local:
        behind = pool.open_behind(hashes, kept.first, blocks_for(tokens, size), reserve, sunk=kept.slots)
        return OpenedPages(root, hashes, behind, None, kept)
    limit = holdable_of(request, tokens, size) if message.local else holdable(tokens, size)
    limit = limit if kept is None else min(limit, kept.first)
    asked = hashes[: tokens // size], blocks_for(tokens, size), limit, reserve
    sight = sight if message.local else sight.behind(tokens, size)
    return OpenedPages(root, hashes, *opened(pool, rules, *asked, brought=not message.local, sight=sight), kept)
