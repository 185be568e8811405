"""Affinity of adapters, over every policy: a holder is preferred, and who must load the adapter can still win."""

from __future__ import annotations

import msgspec
import pytest

from baton.router.policies import Candidate, ClusterSnapshot, RoutingRequest, load_policy, names
from baton.router.policies.adjustments.adapter_loads import with_adapter_loads
from tests.router.policies.test_policies import snapshot, worker

LONG = RoutingRequest(2000, 16)


def lacking(found: Candidate, seconds: float = 0.5) -> Candidate:
    return msgspec.structs.replace(found, adapter_s=seconds)


def four(p0: float, p1: float, d0: float, d1: float, busy: int = 0) -> ClusterSnapshot:
    prefill = [lacking(worker("p0", "prefill"), p0), lacking(worker("p1", "prefill"), p1)]
    decode = [lacking(worker("d0", "decode", sequences=busy), d0), lacking(worker("d1", "decode"), d1)]
    return snapshot(prefill, decode)


@pytest.mark.parametrize("name", names())
def test_the_workers_that_hold_the_adapter_are_taken(name):
    policy = with_adapter_loads(load_policy(name))
    for turn in range(4):
        seen = msgspec.structs.replace(four(0.5, 0, 0.5, 0), turn=turn)
        taken = policy(seen, LONG).taken
        assert (taken.prefill, taken.decode) == ("p1", "d1")


@pytest.mark.parametrize("name", names())
def test_without_a_load_a_policys_choice_is_its_own(name):
    policy, seen = load_policy(name), four(0, 0, 0, 0)
    assert with_adapter_loads(policy)(seen, LONG) == policy(seen, LONG)


@pytest.mark.parametrize("name", names())
def test_where_nobody_holds_it_somebody_loads_it(name):
    assert with_adapter_loads(load_policy(name))(four(0.5, 0.5, 0.5, 0.5), LONG) is not None


@pytest.mark.parametrize("name", names())
def test_a_full_holder_gives_way_to_one_that_must_load(name):
    full = msgspec.structs.replace(worker("d0", "decode"), full=True)
    seen = snapshot([worker("p0", "prefill")], [full, lacking(worker("d1", "decode"))])
    assert with_adapter_loads(load_policy(name))(seen, LONG).taken.decode == "d1"


@pytest.mark.parametrize("name", names())
def test_decode_workers_dont_read_long_prompts_because_no_prefill_worker_holds_it(name):
    taken = with_adapter_loads(load_policy(name))(four(0.1, 0.1, 0, 0), LONG).taken
    assert taken.way == "prefill"


@pytest.mark.parametrize("name", names())
def test_a_holder_of_other_weights_leaves_no_decode_worker_to_read_long_prompts(name):
    """A holder of other weights can't prefill for the decode worker; another can, once it has the adapter."""
    stranger = worker("p0", "prefill", fingerprint="g")
    seen = snapshot([stranger, lacking(worker("p1", "prefill"))], [worker("d0", "decode")], local_max_tokens=-1)
    for turn in range(2):
        taken = with_adapter_loads(load_policy(name))(msgspec.structs.replace(seen, turn=turn), LONG).taken
        assert (taken.way, taken.prefill, taken.decode) == ("prefill", "p1", "d0")


def test_a_busy_holder_is_dearer_than_a_short_load_and_the_record_says_so():
    policy = with_adapter_loads(load_policy("cost"))
    decision = policy(four(0, 0, 0, 0.001, busy=7), LONG)
    assert decision.taken.decode == "d1"
    assert decision.taken.terms["adapter"] == 0.001
    held = next(o for o in decision.options if o.decode == "d0")
    assert "adapter" not in held.terms
    assert policy(four(0, 0, 0, 60.0, busy=7), LONG).taken.decode == "d0"


def test_loads_on_both_workers_of_a_way_run_beside_each_other():
    decision = with_adapter_loads(load_policy("cost"))(four(0.2, 0.2, 0.3, 0.3), LONG)
    assert decision.taken.terms["adapter"] == 0.3
