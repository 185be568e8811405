"""The hosts of a worker's ranks that each send their own part of every page, and the connections to them.

Knows nothing of prompts or of the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial

import grpc.aio
import msgspec

from baton.kv.layout.extents import Part
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport.grpc import CHANNEL_OPTIONS
from baton.prefill_worker.io.divided_handoff import FarHost
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.host_handoff import HostHandoff
from baton.prefill_worker.io.host_orders import REACH_METHOD, REACHED, HostBegin, HostReach, encode
from baton.prefill_worker.io.host_ways import FIRST_S, HostWays, Way
from baton.protos.channel import HostSender
from baton.tls.rpc import Dialer

REACH_S = 30.0  # seconds for a host to say whether it reaches a receiver: to measure each transport takes some


class HostSenders:
    """Makes handoffs that ``senders`` divide, the own host's first. ``kv_transport`` is the setting by which hosts
    choose how they send; ``clock`` gives monotonic seconds. A handoff waits for up to ``first_s`` seconds until a
    host says for the first time whether it reaches a receiver.
    """

    def __init__(
        self,
        senders: Sequence[HostSender],
        memory: PageMemory,
        kv_transport: str,
        dialer: Dialer,
        clock: Callable[[], float] = time.monotonic,
        first_s: float = FIRST_S,
    ) -> None:
        self._own, *self._others = senders
        self._memory, self._kv_transport, self._dialer = memory, kv_transport, dialer
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._generation = dialer.generation
        self._ways = HostWays(self._ask, clock, first_s)

    @property
    def part(self) -> Part:
        """Returns what the lead's own host sends of every page."""
        return self._own.part

    def others(self, sender: Sender, incarnation: str) -> list[FarHost]:
        """Returns the other hosts, for handoffs of ``sender`` to process ``incarnation`` of a decode worker."""
        return [
            FarHost(
                each.part,
                partial(self._handoff, each, sender, incarnation),
                partial(self._reaches, each, incarnation),
            )
            for each in self._others
        ]

    def _handoff(
        self, host: HostSender, sender: Sender, incarnation: str, to: Destination, part: Part, receivers: int
    ) -> HostHandoff:
        pages, way = (self._memory.pages, self._memory.page_bytes), self._kv_transport
        begin = HostBegin(host.token, sender, to, *pages, part, (0, 0), way, incarnation, receivers)
        failed = partial(self._ways.forget, Way(host.address, to.address, incarnation))
        return HostHandoff(self._channel(host.address), begin, failed)

    async def _reaches(self, host: HostSender, incarnation: str, address: str) -> bool:
        return await self._ways.works(Way(host.address, address, incarnation))

    async def _ask(self, way: Way) -> str:
        """Returns why a host can't ship to a receiver, "" if it can."""
        (token,) = {each.token for each in self._others if each.address == way.host}
        of = self._memory.pages, self._memory.page_bytes, self._kv_transport
        asked = encode(HostReach(token, way.address, way.incarnation, *of))
        try:
            async with asyncio.timeout(REACH_S):
                return REACHED.decode(await self._channel(way.host).unary_unary(REACH_METHOD)(asked)).problem
        except TimeoutError:
            return f"it doesn't say within {REACH_S:.0f} s whether it reaches that"
        except (grpc.aio.AioRpcError, msgspec.MsgspecError) as error:
            return f"it doesn't say whether it reaches that ({error})"

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._dialer.generation != self._generation:  # a renewed certificate; open handoffs keep their channel
            self._generation = self._dialer.generation
            self._channels.clear()
        if address not in self._channels:
            self._channels[address] = self._dialer.channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    async def close(self) -> None:
        """Closes the connections to the KV senders of all other hosts."""
        await self._ways.close()
        for channel in self._channels.values():
            await channel.close()
