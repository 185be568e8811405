"""What a perfect prefix cache would have held: one that never forgets and that all workers share.

Knows nothing of workers. The hit rate of the real caches is read beside it. Blocks are remembered in two
generations of ``kept`` each, so that memory is bounded: 16 tokens cost some 100 bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from baton.protos.nouns import BLOCK_TOKENS
from baton.router.request import RouterRequest
from baton.router.tagging import ContextClasses

REMEMBERED_REQUESTS = 4096  # a request asks again for each choice and each retry
KEPT_BLOCKS = 400_000
KEY_BYTES = 8


class EndlessCache:
    """The blocks of every prompt so far.

    Another router process's prompts are not seen: with several of them it is a lower bound.
    """

    def __init__(self, kept: int = KEPT_BLOCKS) -> None:
        self._kept = kept
        self._young: set[bytes] = set()
        self._old: set[bytes] = set()

    def seen(self, hashes: Sequence[bytes]) -> int:
        """Leading blocks of a chain that came before; from now on all of them did.

        A chain's block was seen only if those before it were, so the end of what is known is found by halves.
        """
        low, high = 0, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if self._has(hashes[middle][:KEY_BYTES]):
                low = middle + 1
            else:
                high = middle
        self._young.update([h[:KEY_BYTES] for h in hashes])
        if len(self._young) >= self._kept:
            self._old, self._young = self._young, set()
        return low

    def _has(self, key: bytes) -> bool:
        return key in self._young or key in self._old


class ReuseMeter:
    """Counts, once per request, the tokens an endless cache would have held. ``tell(model, class, tokens)``."""

    def __init__(self, classes: ContextClasses, tell: Callable[[str, str, int], object]) -> None:
        self._cache, self._classes, self._tell = EndlessCache(), classes, tell
        self._lately: OrderedDict[str, None] = OrderedDict()

    def __call__(self, request: RouterRequest, hashes: Sequence[bytes]) -> None:
        """A prompt came; at least one of its tokens is always computed."""
        if request.request_id in self._lately:
            return
        self._lately[request.request_id] = None
        if len(self._lately) > REMEMBERED_REQUESTS:
            self._lately.popitem(last=False)
        tokens = len(request.token_ids)
        found = min(self._cache.seen(hashes) * BLOCK_TOKENS, tokens - 1)
        self._tell(request.model_id, self._classes.tag(tokens), found)
