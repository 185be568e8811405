"""Says how long a simulated decode worker waits whose batch found no page. Torch-free."""

from __future__ import annotations

from baton.kv.pages.pool import PagePool
from baton.protos.errors import PoolExhausted

RETRY_S = (
    1e-3  # seconds until a batch without a page looks again: requests that wait for their KV may give pages back
)


def retry_seconds(pool: PagePool, own: int) -> float:
    """Returns the seconds until a batch that holds ``own`` pages and found no other looks again.

    Raises PoolExhausted if nobody else holds any.
    """
    if pool.snapshot_counts().leased <= own:
        raise PoolExhausted("the decode worker's pool can't hold its oldest sequence", "pages")
    return RETRY_S
