"""Charges calls to the rates of their callers' keys.

Knows nothing of how keys are kept or how a call is answered.
"""

from __future__ import annotations

import msgspec

from baton.cluster.metering.telemetry import RouterMetrics
from baton.protos.errors import BatonError
from baton.router.access.caller import CALLER
from baton.router.access.gate import AccessGate
from baton.router.access.keys import ApiKey
from baton.router.answer.generation import Generation
from baton.router.observe.decisions import DecisionLog
from baton.router.request.context_class import ContextClasses
from baton.router.text.catalog import ModelEntry

# Tokens of a tokenizer call that count as one, because clients count before they ask, and it is no worker's work.
TOKENIZER_SHARE = 16


class Quotas(msgspec.Struct, frozen=True):
    """Charges calls to their callers' keys, and records refused calls in the metrics and the decision log."""

    gate: AccessGate
    metrics: RouterMetrics
    decisions: DecisionLog
    classes: ContextClasses

    async def charge(self, generation: Generation) -> None:
        """Counts a call's choices (as requests) and prompt tokens against its key's rates.

        Raises Forbidden, QuotaExceeded, and records the refusal.
        """
        context, requests = generation.context, len(generation.prompts) * generation.options.n
        try:
            await self._charge(context.key, generation.entry, requests, generation.prompt_tokens)
        except BatonError as error:
            self.metrics.refused.labels(error.label).inc()
            for request in generation.requests():
                self.decisions.refused(request, self.classes.tag_of(request), error)
            raise

    def refund(self, generation: Generation, requests: int, tokens: int) -> None:
        """Gives back so many of a call's choices and prompt tokens, which no worker has answered."""
        self.gate.refund(generation.context.key, requests, tokens)

    async def charge_tokenizer(self, entry: ModelEntry, tokens: int) -> None:
        """Counts a tokenizer call against the caller's rates: one request, and 1/TOKENIZER_SHARE of its ``tokens``.

        Raises Forbidden, QuotaExceeded.
        """
        await self._charge(CALLER.get().key, entry, 1, tokens // TOKENIZER_SHARE)

    async def _charge(self, key: ApiKey | None, entry: ModelEntry, requests: int, tokens: int) -> None:
        adapter = entry.adapter.name if entry.adapter is not None else ""
        await self.gate.charge(key, entry.model_id, requests, tokens, adapter)
