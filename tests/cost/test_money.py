"""Tests the cost of a million tokens."""

from baton.cost.money import PerMillion, per_million


def test_input_pays_for_prefill_output_for_decode_and_both_for_all():
    assert per_million(2.0, 3.0, 1e6, 0.5e6) == PerMillion(2.0, 6.0, 5.0 / 1.5)


def test_without_prefill_workers_only_the_whole_is_said():
    assert per_million(0.0, 3.0, 1e6, 0.5e6) == PerMillion(None, None, 2.0)


def test_without_tokens_there_is_no_price_per_token():
    assert per_million(2.0, 3.0, 0, 0) == PerMillion(None, None, None)
