"""The life of a follower rank on a card: takes one plan of the lead after the other and runs its part.

Knows nothing of schedulers or requests. Between two steps it waits in native code.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import socket
from collections.abc import Callable

import msgspec

from baton.engine.backends.ranks.cards.card import Card
from baton.engine.backends.ranks.cards.load import load_card
from baton.engine.backends.ranks.cards.shared import LEFT, TakenPlan, card_ranks, card_sizes, declare, done, take
from baton.engine.backends.ranks.followers import HEARD, LOST_STATUS, MOST_WORDS, RankReady, RankSpec, RoomPlan
from baton.engine.backends.ranks.memory import RanksStruct, SharedMemory
from baton.kernels.cuda.library import DeviceError
from baton.protos.errors import ConfigError, to_info

log = logging.getLogger("baton.engine")

Receive = Callable[[socket.socket], tuple[int, int]]


def follow_on_card(spec: RankSpec, lead: socket.socket, received: Receive) -> int:
    """Runs a follower until the lead tells it to leave; returns the process's exit status: 0 then, 1 if loading
    failed, LOST_STATUS if a rank is gone.

    ``received`` returns the next descriptor and size from the lead.
    """
    try:
        loaded = load_card(spec.config, spec.index, spec.cards)
    except Exception as error:
        lead.send(msgspec.json.encode(RankReady(error=to_info(error))))
        return 1
    card, own, bound_s = loaded.card, loaded.own, spec.config.rank_bound_s
    lead.send(msgspec.json.encode(RankReady(loaded.fingerprint, room=card.rooms.handle)))
    memory = SharedMemory(received(lead)[0], card_sizes(own, card.program.rope.width))
    card.join(memory, msgspec.json.decode(lead.recv(MOST_WORDS), type=RoomPlan).handles, bound_s)
    lead.send(HEARD)
    fd, size = received(lead)
    pages = mmap.mmap(fd, size, mmap.MAP_SHARED)
    if not _is_bound(card, pages, lead):
        return 1
    return LOST_STATUS if take_plans(card, card_ranks(memory, own, bound_s), own.rank.index) else 0


def _is_bound(card: Card, pages: mmap.mmap, lead: socket.socket) -> bool:
    """Pins the pages for the card, which takes seconds for many, tells the lead, and returns whether it worked."""
    try:
        card.bind(ctypes.addressof(ctypes.c_char.from_buffer(pages)), len(pages) // card.page_bytes)
    except ConfigError as error:
        lead.send(msgspec.json.encode(RankReady(error=to_info(error))))
        return False
    lead.send(msgspec.json.encode(RankReady()))
    return True


def take_plans(card: Card, ranks: RanksStruct, index: int) -> int:
    """Runs the part of rank ``index`` of one plan after the other; returns 0 when told to leave, or a lost rank's
    code.
    """
    plan = TakenPlan()
    while not (code := take(ranks, plan)):
        try:
            card.run(plan.step, plan.brought, plan.brought_count, plan.positions)
            lost = card.rooms.lost()
        except DeviceError as error:
            log.error("rank %d: the step failed on its card: %s", index, error)
            lost = index + 1
        if code := declare(ranks, lost) if lost else done(ranks):
            break
    return 0 if code == LEFT else code
