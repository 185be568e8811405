"""Session affinity: a bounded memory of the decode worker that served each session's last turn.

Knows nothing of policies, nor of what a turn said. A session that this process hasn't seen (its turns went to
another router, or it is new) gets a worker by rendezvous hashing (Thaler and Ravishankar 1998), so every router
picks the same one without a shared store. Both are preferences; ``policies._session`` limits what one may cost.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from baton.router.request.request import ChoiceSummary, RouterRequest

KEPT_SESSIONS = 65_536  # about 150 bytes each
KEY_BYTES = 16  # bytes of a session's hash


class SessionHomes:
    """Remembers the decode worker of the ``kept`` most recently served sessions."""

    def __init__(self, kept: int = KEPT_SESSIONS) -> None:
        self._kept = kept
        self._homes: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def home(self, request: RouterRequest, workers: Sequence[str]) -> str:
        """Returns the worker among ``workers`` that the request's session prefers; "" without a session or
        workers.
        """
        if not request.context.session or not workers:
            return ""
        key = _key(request)
        last = self._homes.get(key, "")
        return last if last in workers else rendezvous(key, workers)

    def served(self, request: RouterRequest, summary: ChoiceSummary) -> None:
        """Notes the decode worker of a session's turn that produced tokens: it holds the turn's KV blocks."""
        if not request.context.session or not summary.decode_worker or not summary.completion_tokens:
            return
        key = _key(request)
        self._homes[key] = summary.decode_worker
        self._homes.move_to_end(key)
        if len(self._homes) > self._kept:
            self._homes.popitem(last=False)


def rendezvous(key: bytes, workers: Sequence[str]) -> str:
    """Returns the worker whose hash with ``key`` is highest; a worker that comes or goes moves only its own
    sessions.
    """
    return max(workers, key=lambda w: hashlib.blake2b(w.encode(), key=key, digest_size=8).digest())


def _key(request: RouterRequest) -> bytes:
    """A session's name is its tenant's own, and a model's."""
    parts = (request.context.tenant, request.model_id, request.context.adapter_id, request.context.session)
    return hashlib.blake2b(repr(parts).encode(errors="surrogatepass"), digest_size=KEY_BYTES).digest()
