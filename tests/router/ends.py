"""Choices that are over, as a meter tells of them."""

from baton.router.observe.live import ChoiceOutcome


def ended(**fields) -> ChoiceOutcome:
    """A request that was met, but for ``fields``."""
    base = {
        "at": 1.0, "request_id": "r", "model": "m", "context_class": "short", "outcome": "stop", "way": "prefill",
        "prefill": "p0", "decode": "d0", "prompt_tokens": 100, "cached_tokens": 40, "output_tokens": 10,
        "duration_s": 0.5, "ttft_s": 0.1, "tpot_s": 0.02, "longest_gap_s": 0.05, "stations": {"queue": 0.01},
        "slo_ttft_s": 0.2, "slo_tpot_s": 0.05, "verdict": "met",
    }  # fmt: skip
    return ChoiceOutcome(**(base | fields))
