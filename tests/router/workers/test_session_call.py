"""Tests what a router takes from the end of a session's call."""

from __future__ import annotations

from typing import cast

import grpc.aio
import pytest

from baton.protos.errors import Draining
from baton.router.workers.decode_session import DecodeSession
from baton.router.workers.session_call import read_all


class EndedCall:
    async def read(self) -> object:
        return grpc.aio.EOF


async def test_a_worker_that_ends_its_session_in_order_leaves_and_has_not_failed() -> None:
    with pytest.raises(Draining, match="d0 closed the session"):
        await read_all(cast(grpc.aio.StreamStreamCall, EndedCall()), DecodeSession("d0"))
