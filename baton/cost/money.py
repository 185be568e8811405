"""The price of a million tokens, defined once for the dashboard, the metrics' rules and the planner.

Knows nothing of where prices and counts come from. Dollars and tokens are of the same stretch of time. Input tokens
(all of the prompts, cached ones too) pay for prefill workers, output tokens for decode workers; over both together,
all dollars are divided by all tokens. Idle time is paid for by the tokens that there were.
"""

from __future__ import annotations

import msgspec


class PerMillion(msgspec.Struct, frozen=True):
    """Holds dollars per 1M tokens; None if there were no tokens.

    ``input`` and ``output`` are None also without prefill workers: decode workers then do both, and only ``all`` is
    defined.
    """

    input: float | None
    output: float | None
    all: float | None


def per_million(
    prefill_dollars: float, decode_dollars: float, input_tokens: float, output_tokens: float
) -> PerMillion:
    """Returns the price per 1M tokens, from dollars per role and tokens of the same time (or of an hour, both)."""
    apart = prefill_dollars > 0
    return PerMillion(
        _over(prefill_dollars, input_tokens) if apart else None,
        _over(decode_dollars, output_tokens) if apart else None,
        _over(prefill_dollars + decode_dollars, input_tokens + output_tokens),
    )


def _over(dollars: float, tokens: float) -> float | None:
    return dollars / tokens * 1e6 if tokens else None
