"""Which decode worker served a session's last turn: a bounded memory of this process.

Knows nothing of policies, nor of what a turn said. A session that this process hasn't seen (its turns went to
another router, or it is new) gets a home by rendezvous hashing (Thaler and Ravishankar 1998): every router names
the same one, with no store between them. Both are wishes; ``policies._session`` says what one may cost.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from baton.router.request.request import ChoiceSummary, RouterRequest

KEPT_SESSIONS = 65_536  # about 150 bytes each
KEY_BYTES = 16  # bytes of a session's hash


class SessionHomes:
    """Remembers where the last ``kept`` sessions were decoded, by what was heard of them last."""

    def __init__(self, kept: int = KEPT_SESSIONS) -> None:
        self._kept = kept
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, request: RouterRequest, workers: Sequence[str]) -> str:
        """Returns the one of ``workers`` that ``request`` should go to; "" without a session or workers."""
        if not request.context.session or not workers:
            return ""
        key = _key(request)
        last = self._homes.get(key, "")
        return last if last in workers else rendezvous(key, workers)

    def served(self, request: RouterRequest, summary: ChoiceSummary) -> None:
        """Notes that a session's decode worker wrote something, so the turn's blocks are there."""
        if not request.context.session or not summary.decode_worker or not summary.completion_tokens:
            return
        key = _key(request)
        self._homes[key] = summary.decode_worker
        self._homes.move_to_end(key)
        if len(self._homes) > self._kept:
            self._homes.popitem(last=False)


def rendezvous(key: bytes, workers: Sequence[str]) -> str:
    """Returns the worker whose hash with ``key`` is the highest: others coming and going move only their own
    sessions.
    """
    return max(workers, key=lambda w: hashlib.blake2b(w.encode(), key=key, digest_size=8).digest())


def _key(request: RouterRequest) -> bytes:
    """A session's name is its tenant's own, and a model's."""
    parts = (request.context.tenant, request.model_id, request.context.adapter_id, request.context.session)
    return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()
