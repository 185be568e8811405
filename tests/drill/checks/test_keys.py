"""The witness of API keys reports who came in without a good key, and who had one and was refused."""

from __future__ import annotations

import pytest

from baton.drill.checks.keys import HEARD_S, LET_IN, NOT_ITS_MODEL, UNKNOWN, KeyWitness, salt_of
from baton.drill.scenario import ClientKey, Request
from baton.protos.nouns import Sampling
from baton.router.access.keys import ApiKey

KEYS = (ClientKey("acme"), ClientKey("acme", bound_elsewhere=True), ClientKey("other", revoked_at=5.0))
REVOKED_AT = 5.2


def request(key: int | None, over_grpc: bool = False) -> Request:
    return Request(0, 0.0, (1, 2), Sampling(), tenant="acme", key=key, over_grpc=over_grpc)


@pytest.mark.parametrize(
    ("key", "asked", "over_grpc", "allowed"),
    [
        (0, 1.0, False, {LET_IN}),
        (1, 1.0, False, {NOT_ITS_MODEL}),
        (None, 1.0, False, {UNKNOWN}),
        (-1, 1.0, False, {UNKNOWN}),
        (2, REVOKED_AT - 0.1, False, {LET_IN}),
        (2, REVOKED_AT - 0.1, True, {LET_IN, UNKNOWN}),
        (2, REVOKED_AT + 0.1, False, {LET_IN, UNKNOWN}),
        (2, REVOKED_AT + HEARD_S + 0.1, False, {UNKNOWN}),
    ],
)
def test_a_call_ends_as_its_key_says(key: int | None, asked: float, over_grpc: bool, allowed: set[str]) -> None:
    for ending in (LET_IN, NOT_ITS_MODEL, UNKNOWN):
        said: list[str] = []
        witness = KeyWitness(KEYS, said.append)
        witness.revoked(2, REVOKED_AT)
        witness.asked(0, asked)
        rightly = witness.ended(request(key, over_grpc), ending, answered=ending == LET_IN)
        assert (not said) == (ending in allowed)
        assert rightly == (ending in allowed - {LET_IN})


def test_a_call_that_failed_otherwise_says_nothing_of_its_key() -> None:
    said: list[str] = []
    assert not KeyWitness(KEYS, said.append).ended(request(None), LET_IN, answered=False)
    assert not said


def test_without_keys_everybody_comes_in() -> None:
    said: list[str] = []
    assert not KeyWitness((), said.append).ended(request(None), LET_IN, answered=True)
    assert not said


def test_the_witness_knows_the_salt_that_a_keys_tenant_has() -> None:
    assert salt_of(request(0)) == ApiKey("id", "acme", "").salt
    assert salt_of(request(None)) == b"acme"
