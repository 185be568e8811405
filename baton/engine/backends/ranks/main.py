"""The process of a follower rank: loads its part of the model, then runs one plan of the lead after the other.

Knows nothing of schedulers or requests. Between two steps no Python runs: the native code waits for the next plan.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
from importlib import import_module

import msgspec

from baton.engine.backends.ranks.followers import HEARD, LOST_STATUS, MOST_WORDS, RankReady, RankSpec
from baton.engine.backends.ranks.hosts.links import Links
from baton.engine.backends.ranks.hosts.secured import rank_identity
from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.backends.ranks.load import LoadedRank, RankNotes, load_rank
from baton.engine.backends.ranks.memory import HEAR, RanksStruct, SharedMemory, bring_pages, follow, sizes_for
from baton.engine.child import child_arguments
from baton.engine.load import QUIET_THREADS
from baton.kernels.abi import native
from baton.protos.errors import to_info


def main() -> int:
    """Runs one follower; returns its exit status: 0 when told to leave, 1 if loading failed, LOST_STATUS if another
    rank is gone.
    """
    args = child_arguments("baton.engine.backends.ranks.main", "RankSpec")
    os.environ.setdefault(*QUIET_THREADS)
    spec = msgspec.json.decode(args.spec, type=RankSpec)
    with socket.socket(fileno=args.fd) as lead:
        if spec.config.device == "cuda":
            return _on_card(spec, lead)
        try:
            loaded = _load(spec)
        except Exception as error:
            lead.send(msgspec.json.encode(RankReady(error=to_info(error))))
            return 1
        lead.send(msgspec.json.encode(RankReady(loaded.fingerprint)))
        return _follow(spec, loaded, lead)


def _on_card(spec: RankSpec, lead: socket.socket) -> int:
    assert spec.config.threads is not None, "the lead deals the threads"
    native.set_threads(spec.config.threads)
    status: int = import_module("baton.engine.backends.ranks.cards.follower").follow_on_card(spec, lead, _received)
    return status


def _load(spec: RankSpec) -> LoadedRank:
    assert spec.config.threads is not None, "the lead deals the threads"
    native.set_threads(spec.config.threads)
    return load_rank(spec.config, spec.index)


def _follow(spec: RankSpec, loaded: LoadedRank, lead: socket.socket) -> int:
    memory = SharedMemory(_received(lead)[0], sizes_for(loaded.program, loaded.native))
    fd, size = _received(lead)
    pages = mmap.mmap(fd, size, mmap.MAP_SHARED)
    struct = memory.struct(loaded.native, spec.config.rank_bound_s)
    struct.pages = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    plan: LinkPlan | None = None
    if spec.hosted:
        plan, links = _linked(spec, struct, lead)
        struct.group.links = links.address
    notes = RankNotes(loaded, spec.config)
    struct.adapters = notes.adapters.table
    while (code := follow(loaded.native.struct, struct)) == HEAR:
        note = notes.take(*_received(lead))
        lead.send(HEARD)
        if note is not None and (code := bring_pages(struct, note, plan)):
            break
    return LOST_STATUS if code else 0


def _linked(spec: RankSpec, struct: RanksStruct, lead: socket.socket) -> tuple[LinkPlan, Links]:
    """Returns which ranks are where, as the next message says, and the rank's connections to other hosts."""
    plan = msgspec.json.decode(lead.recv(MOST_WORDS), type=LinkPlan)
    identity = rank_identity(spec.config.tls, f"rank {spec.index}")
    links = Links(plan, spec.index, struct.group.meeting, struct.pages, spec.config.rank_bound_s, identity)
    lead.send(HEARD)
    return plan, links


def _received(lead: socket.socket) -> tuple[int, int]:
    """Returns a descriptor and a size; exits the process if the lead is gone."""
    said, fds, _, _ = socket.recv_fds(lead, 8, 1)
    if not fds:
        sys.exit(0)
    return fds[0], int.from_bytes(said, "little")


if __name__ == "__main__":
    sys.exit(main())
