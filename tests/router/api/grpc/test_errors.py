"""Errors of gRPC calls: what is told, and what is logged of a call that ended before it could be told anything."""

from __future__ import annotations

import logging

import grpc
import pytest

from baton.protos.errors import DeadlineExceeded
from baton.router.api.grpc.errors import grpc_errors


class EndedCall:
    """Stands for a call whose deadline passed: as grpc.aio has it, nothing can be sent, and one may abort once."""

    def __init__(self) -> None:
        self.aborts = 0

    async def abort(self, *told: object) -> None:
        self.aborts += 1
        raise grpc.aio.InternalError("Failed execute_batch") if self.aborts == 1 else grpc.aio.UsageError("twice")


@pytest.mark.parametrize("error", [DeadlineExceeded("late"), RuntimeError("a bug")])
async def test_a_call_that_is_over_is_aborted_once_and_is_no_failure(caplog, error: Exception) -> None:
    call = EndedCall()
    with caplog.at_level(logging.INFO), pytest.raises(grpc.aio.AbortError):
        async with grpc_errors(call), grpc_errors(call):
            raise error
    assert call.aborts == 1
    assert [record.message for record in caplog.records] == ["a gRPC call failed"] * isinstance(error, RuntimeError)
