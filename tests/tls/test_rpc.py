"""Tests baton.tls.rpc: who may call what, and whom we talk to."""

import asyncio

import grpc
import grpc.aio
import pytest

from baton.protos.v1 import worker_pb2 as w
from baton.protos.v1 import worker_pb2_grpc as stubs
from baton.tls.rpc import PLAIN, WORKER_CALLS, Dialer, NameGuard, add_port, handshake_failure, names_for
from tests.tls.papers import identity

REFUSED, OPEN = grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED


class Everything(stubs.WorkerServicer, stubs.PrefillWorkerServicer, stubs.DecodeWorkerServicer):
    """Does nothing: a call that passes the guard is UNIMPLEMENTED, or streams one message."""

    async def Describe(self, request, context):
        return w.WorkerInfo(worker_id="decode-0")

    async def Snapshot(self, request, context):
        await context.abort(OPEN, "past the guard")

    Drain = SetRole = Prefill = Snapshot

    async def Fetch(self, request, context):
        yield w.FetchedBlock()

    async def Session(self, incoming, context):
        yield w.SessionDown()


@pytest.fixture
async def port():
    server = grpc.aio.server(interceptors=(NameGuard(names_for(WORKER_CALLS, "baton.internal"), "decode-0"),))
    stubs.add_WorkerServicer_to_server(Everything(), server)
    stubs.add_PrefillWorkerServicer_to_server(Everything(), server)
    stubs.add_DecodeWorkerServicer_to_server(Everything(), server)
    number = add_port(server, "127.0.0.1:0", identity("worker"))
    await server.start()
    yield f"127.0.0.1:{number}"
    await server.stop(0)


CALLS = {
    "Describe": (stubs.WorkerStub, w.DescribeRequest, {"router", "worker", "client"}),
    "Snapshot": (stubs.WorkerStub, w.SnapshotRequest, {"router", "worker", "client"}),
    "Drain": (stubs.WorkerStub, w.DrainRequest, {"router", "client"}),
    "SetRole": (stubs.WorkerStub, w.SetRoleRequest, {"router", "client"}),
    "Fetch": (stubs.WorkerStub, w.FetchRequest, {"worker"}),
    "Prefill": (stubs.PrefillWorkerStub, w.PrefillRequest, {"router"}),
    "Session": (stubs.DecodeWorkerStub, None, {"router"}),
}


async def outcome(channel: grpc.aio.Channel, method: str) -> grpc.StatusCode:
    stub, request, _ = CALLS[method]
    call = getattr(stub(channel), method)
    try:
        if request is None:
            await call(timeout=30).read()
        elif method == "Fetch":
            await call(request(), timeout=30).read()
        else:
            await call(request(), timeout=30)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_each_call_is_for_its_roles_alone(port: str, caplog: pytest.LogCaptureFixture) -> None:
    for role in ("router", "worker", "client", "monitor", "nobody"):
        async with Dialer(identity(role)).channel(port) as channel:
            allowed = {method for method in CALLS if await outcome(channel, method) is not REFUSED}
        assert allowed == {method for method, (*_, roles) in CALLS.items() if role in roles}, role
    assert "TLS refused on decode-0: a certificate for somebody.example may not call" in caplog.text


async def test_the_error_of_a_refused_role_is_typed_and_says_whose_call_it_is(port: str) -> None:
    async with Dialer(identity("worker")).channel(port) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=r"it takes one for router\.baton\.internal") as raised:
            await stubs.PrefillWorkerStub(channel).Prefill(w.PrefillRequest(), timeout=30)
    assert dict(raised.value.trailing_metadata() or ()).get("baton-error-bin")


async def test_a_server_without_the_name_of_its_role_is_left_with_the_cause(port: str) -> None:
    async with Dialer(identity("router")).channel(port, role="router") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stubs.WorkerStub(channel).Describe(w.DescribeRequest(), timeout=30)
    assert "router.baton.internal" in handshake_failure(raised.value) or "Verification" in str(raised.value)


async def test_a_server_of_a_strangers_ca_is_left_with_the_cause(port: str) -> None:
    async with Dialer(identity("router", ca="stranger")).channel(port) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stubs.WorkerStub(channel).Describe(w.DescribeRequest(), timeout=30)
    assert "unable to get local issuer certificate" in handshake_failure(raised.value)


async def test_plaintext_and_nobodys_certificates_do_not_get_in(port: str) -> None:
    for dialer in (PLAIN, Dialer(identity("router", of="stranger")), Dialer(identity("expired"))):
        async with dialer.channel(port) as channel:
            assert await outcome(channel, "Describe") is grpc.StatusCode.UNAVAILABLE


async def test_many_calls_at_once_shake_hands_and_pass(port: str) -> None:
    async def one() -> str:
        async with Dialer(identity("router")).channel(
            port, options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            return (await stubs.WorkerStub(channel).Describe(w.DescribeRequest(), timeout=60)).worker_id

    assert await asyncio.gather(*(one() for _ in range(20))) == ["decode-0"] * 20
