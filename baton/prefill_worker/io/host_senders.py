"""The hosts of a worker's ranks that each send their own part of every page, and the connections to them.

Knows nothing of prompts or of the engine.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import grpc.aio

from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport.grpc import CHANNEL_OPTIONS
from baton.prefill_worker.io.handoff import Handoff
from baton.prefill_worker.io.handoff_frames import Destination, Sender
from baton.prefill_worker.io.host_handoff import DividedHandoff, HostHandoff
from baton.prefill_worker.io.host_orders import HostBegin
from baton.prefill_worker.io.wire_plan import WirePlan
from baton.protos.channel import HostSender
from baton.tls.rpc import Dialer

TakesParts = Callable[[str], Awaitable[bool]]


class HostSenders:
    """Makes handoffs that ``senders`` divide, the own host's first. ``takes_parts(address)`` says whether a decode
    worker takes pages in parts. ``kv_transport`` is the setting by which hosts choose how they send.
    """

    def __init__(
        self,
        senders: Sequence[HostSender],
        memory: PageMemory,
        kv_transport: str,
        dialer: Dialer,
        takes_parts: TakesParts,
    ) -> None:
        self._own, *self._others = senders
        self._memory, self._kv_transport = memory, kv_transport
        self._dialer, self._takes_parts = dialer, takes_parts
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._generation = dialer.generation

    def handoff(
        self,
        own: Handoff,
        sender: Sender,
        to: Destination,
        incarnation: str,
        plan: Callable[[], Awaitable[WirePlan]],
    ) -> DividedHandoff:
        """Returns the handoff of which ``own`` is this host's part."""
        pages = self._memory.pages, self._memory.page_bytes
        hosts = [
            HostHandoff(
                self._channel(each.address),
                HostBegin(each.token, sender, to, *pages, each.part, (0, 0), self._kv_transport, incarnation),
            )
            for each in self._others
        ]
        return DividedHandoff(own, self._own.part, hosts, plan, lambda: self._takes_parts(to.address))

    def _channel(self, address: str) -> grpc.aio.Channel:
        if self._dialer.generation != self._generation:  # a renewed certificate; open handoffs keep their channel
            self._generation = self._dialer.generation
            self._channels.clear()
        if address not in self._channels:
            self._channels[address] = self._dialer.channel(address, options=CHANNEL_OPTIONS)
        return self._channels[address]

    async def close(self) -> None:
        """Closes the connections to the KV senders of all other hosts."""
        for channel in self._channels.values():
            await channel.close()
