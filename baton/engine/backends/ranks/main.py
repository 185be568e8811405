"""A follower's process: load own part of the model, then run one plan of the lead after the other.

Knows nothing of schedulers or requests. Between two steps no Python runs: the native code waits for the next plan.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import signal
import socket
import sys

import msgspec

from baton.engine.backends.ranks.followers import RankReady, RankSpec
from baton.engine.backends.ranks.load import LoadedRank, load_rank
from baton.engine.backends.ranks.memory import SharedMemory, follow, sizes_for
from baton.engine.load import QUIET_THREADS
from baton.engine.program.ranks import Rank
from baton.kernels.abi import native
from baton.protos.errors import to_info

PR_SET_PDEATHSIG = 1
LOST_STATUS = 75  # exit status where another rank is gone: the lead says which


def main() -> int:
    """Runs one follower; returns exit status 0 when it was told to leave."""
    parser = argparse.ArgumentParser(prog="baton.engine.backends.ranks.main")
    parser.add_argument("--spec", required=True, help="RankSpec as JSON")
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of the socket pair")
    parser.add_argument("--parent", type=int, required=True, help="pid of the lead")
    args = parser.parse_args()
    _die_with_parent(args.parent)
    os.environ.setdefault(*QUIET_THREADS)
    spec = msgspec.json.decode(args.spec, type=RankSpec)
    with socket.socket(fileno=args.fd) as lead:
        os.set_inheritable(args.fd, False)
        try:
            loaded = _load(spec)
        except Exception as error:
            lead.send(msgspec.json.encode(RankReady(error=to_info(error))))
            return 1
        lead.send(msgspec.json.encode(RankReady(loaded.fingerprint)))
        return _follow(spec, loaded, lead)


def _load(spec: RankSpec) -> LoadedRank:
    assert spec.config.threads is not None, "the lead deals the threads"
    native.set_threads(spec.config.threads)
    return load_rank(spec.config, Rank(spec.index, spec.count))


def _follow(spec: RankSpec, loaded: LoadedRank, lead: socket.socket) -> int:
    memory = SharedMemory(_received(lead)[0], sizes_for(loaded.program, loaded.native))
    fd, size = _received(lead)
    pages = mmap.mmap(fd, size, mmap.MAP_SHARED)
    struct = memory.struct(loaded.native.own, loaded.native.is_shared, spec.config.rank_bound_s)
    struct.pages = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    return LOST_STATUS if follow(loaded.native.struct, struct) else 0


def _received(lead: socket.socket) -> tuple[int, int]:
    """A descriptor and a size. Leaves where the lead is gone."""
    said, fds, _, _ = socket.recv_fds(lead, 8, 1)
    if not fds:
        sys.exit(0)
    return fds[0], int.from_bytes(said, "little")


def _die_with_parent(parent: int) -> None:
    """Has the kernel end this process with the lead, and leaves signals such as Ctrl-C to that one's parent."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the lead is gone already")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


if __name__ == "__main__":
    sys.exit(main())
