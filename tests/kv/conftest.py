"""Limits of the transports, as long as a busy machine takes: a test of slowness says how long itself."""

import pytest

LIMITS = (
    "baton.kv.wire.describing.DESCRIBE_S",
    "baton.kv.transport.nccl.CONNECT_S",
    "baton.kv.transport.tcp.CONNECT_S",
    "baton.kv.wire.inlet.HELLO_S",
    "baton.kv.wire.preflight.TIMEOUT_S",
    "baton.kv.wire.secured.HANDSHAKE_S",
)
PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in LIMITS:
        monkeypatch.setattr(limit, PATIENCE_S)
