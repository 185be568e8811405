"""Cancellations that are swallowed, those that were never ours, and calls that a busy server takes late."""

import asyncio
import contextlib
import subprocess
import sys
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from baton.protos.rpc import UNACCEPTED, heed_cancel, settled


async def fails() -> None:
    await asyncio.sleep(0)
    raise ValueError("mine")


@pytest.mark.parametrize("body_turns", [0, 3])
async def test_a_task_that_fails_in_a_settled_group_leaves_no_cancellation_behind(body_turns: int) -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(fails()), group.create_task(asyncio.sleep(5))]
            for _ in range(body_turns):
                await asyncio.sleep(0)
            await settled(tasks)

    with pytest.raises(ExceptionGroup):
        await work()
    heed_cancel()


async def test_a_cancellation_from_outside_still_ends_a_settled_group() -> None:
    async def work() -> None:
        async with asyncio.TaskGroup() as group:
            await settled([group.create_task(asyncio.sleep(5))])

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_swallowed_cancellation_is_raised_again() -> None:
    async def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(5)
        heed_cancel()

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_to_settle_is_settled() -> None:
    await settled([])


def serve_late(options: list[tuple[str, int]], held_s: float) -> None:
    """Serves health; its event loop stands still for ``held_s`` once a line comes from standard input."""

    async def main() -> None:
        server = grpc.aio.server(options=options)
        health_pb2_grpc.add_HealthServicer_to_server(health.aio.HealthServicer(), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(port, flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print("still", flush=True)
        time.sleep(held_s)
        await server.wait_for_termination()

    asyncio.run(main())


LATE = """
import sys
from tests.protos import test_rpc
key, value, held_s = sys.argv[1:]
test_rpc.serve_late([(key, int(value))], float(held_s))
"""


def codes_of_late_answers(option: tuple[str, int], held_s: float) -> list[grpc.StatusCode]:
    """Returns how calls end that come while the server's event loop stands still."""
    command = [sys.executable, "-c", LATE, option[0], str(option[1]), str(held_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as late:
        assert late.stdin is not None
        assert late.stdout is not None
        with grpc.insecure_channel(f"127.0.0.1:{int(late.stdout.readline())}") as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
            late.stdin.write("\n")
            late.stdin.flush()
            assert late.stdout.readline() == "still\n"
            calls = [stub.Check.future(health_pb2.HealthCheckRequest(), timeout=200) for _ in range(5)]
            found = [call.code() for call in calls]
        late.kill()
    return found


@pytest.mark.thorough  # it takes longer than the 30 seconds after which gRPC gives calls up by itself
def test_calls_wait_for_a_server_that_is_late_however_long_their_deadline_lets_them() -> None:
    assert codes_of_late_answers(UNACCEPTED, 33.0) == [grpc.StatusCode.OK] * 5
    assert grpc.StatusCode.CANCELLED in codes_of_late_answers((UNACCEPTED[0], 1), 5.0), "what is kept from it"
