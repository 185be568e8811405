"""A worker of another process that takes KV from card to card: pages on the stand-in card, and a real intake.

python -m tests.kv.transport.far_card DRIVER PATH HASH…

Prints its address; at the end of stdin, how many blocks it said are resident, whether each page on the host is the
one on the card, and the checksum of those.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import xxhash

from baton.decode_worker.io.intake import Intake
from baton.decode_worker.io.intake_lease import IntakeLease
from baton.kernels.cuda import on_gpu
from baton.kv.memory import cuda_driver, device_copy
from baton.kv.memory.host_pages import PageMemory
from baton.kv.transport import cuda_ipc
from baton.protos.channel import BlocksReceived, Commit
from tests.kv.transport.cards import Shared, kernels
from tests.kv.transport.test_handoffs import FINGERPRINT, LAYOUT, LEASE


async def serve(path: str, hashes: list[bytes]) -> None:
    """Receives until stdin ends."""
    memory = PageMemory.create(len(hashes), LAYOUT.page_bytes)
    card, resident = Shared(cuda_driver.driver(), memory), set[int]()

    def tell(message: Any) -> None:
        if isinstance(message, BlocksReceived):
            resident.update(message.resident)
        if isinstance(message, Commit):
            intake.on_committed(message.key, message.epoch)

    intake = Intake(memory, LAYOUT, FINGERPRINT, tell)
    table = list(range(len(hashes)))[::-1]
    intake.register(IntakeLease(1, LEASE, 1, table, hashes, 0))
    server, address = cuda_ipc.listen(path, intake.accept, memory.device)
    print(address, flush=True)
    await asyncio.to_thread(sys.stdin.read)
    server.close()
    here, there = ([place(page) for page in table] for place in (lambda p: bytes(memory.page(p)), card.page))
    print(len(resident), here == there, xxhash.xxh3_64_hexdigest(b"".join(there)), flush=True)
    card.close()


if __name__ == "__main__":
    if not on_gpu.asked():
        cuda_driver.LIBRARY, device_copy.device = sys.argv[1], kernels
    asyncio.run(serve(sys.argv[2], [bytes.fromhex(said) for said in sys.argv[3:]]))
