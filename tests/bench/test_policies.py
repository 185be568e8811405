"""The replay that compares policies: deterministic, whole, and `cost` answers the most requests in time."""

import pytest

from baton.cost.profiles import load_profile
from baton.router.policies import load_policy
from bench.policies import TRACE, Replay, calls_of, replay

PROFILE = load_profile("h100-llama3-8b")


def test_every_request_is_read_and_written_once_and_nothing_is_left():
    calls = calls_of(TRACE, 12, PROFILE, count=200)
    run = Replay(load_policy("cost"), PROFILE, 3, 2)
    run.run(calls)
    assert all(c.written == c.outputs and c.left == 0 for c in calls)
    assert all(c.arrived <= c.first <= c.ended for c in calls)
    workers = run._workers.values()
    assert not any(
        w.pages or w.sequences or w.pending_tokens or w.reading or w.writing or w.placed for w in workers
    )
    assert 0.3 < run.computed / sum(c.tokens for c in calls) < 1


def test_a_replay_is_deterministic():
    first, again = (replay("cost", 15, 3, 2, PROFILE, count=200) for _ in range(2))
    assert first == again


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_cost_answers_the_most_requests_of_a_real_trace_in_time():
    """Workers that are not alike: the others can't know that p0 is slow."""
    found = ("cost", "least_loaded", "round_robin")
    goodput = {name: replay(name, 15, 3, 2, PROFILE, slow=2.0, repeats=1).goodput for name in found}
    assert goodput["cost"] > 1.02 * goodput["least_loaded"]
    assert goodput["cost"] > 1.02 * goodput["round_robin"]
