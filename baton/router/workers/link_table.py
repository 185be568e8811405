"""The links to all workers, by worker id: opened and dropped as workers come and go.

Knows nothing of policies, queues or Redis: ``sync`` is told who should be there.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Iterator, Mapping

from baton.protos.errors import WorkerLost
from baton.protos.nouns import WorkerInfo
from baton.router.workers.link import STALL_S, DecodeLink, LinkSettings, PrefillLink, WorkerLink
from baton.tls.rpc import PLAIN, Dialer

CHANNEL_OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]


class LinkTable:
    """Keeps one link per worker, by worker id; ``changed`` is called when one goes up or down."""

    def __init__(
        self,
        router_id: str,
        changed: Callable[[], None],
        rng: random.Random,
        stall_s: float = STALL_S,
        dialer: Dialer = PLAIN,
    ) -> None:
        self.router_id = router_id
        self._settings, self._dialer = LinkSettings(router_id, changed, rng, stall_s), dialer
        self._generations: dict[str, int] = {}  # of the certificate that a link's channel was made with
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}

    def __iter__(self) -> Iterator[WorkerLink]:
        return iter(self._links.values())

    def decode(self, worker_id: str) -> DecodeLink:
        """Returns the link to a decode worker. Raises WorkerLost if there is none."""
        link = self._links.get(worker_id)
        if not isinstance(link, DecodeLink):
            raise WorkerLost(f"no decode worker {worker_id}")
        return link

    def prefill(self, worker_id: str) -> PrefillLink:
        """Returns the link to a prefill worker. Raises WorkerLost if there is none."""
        link = self._links.get(worker_id)
        if not isinstance(link, PrefillLink):
            raise WorkerLost(f"no prefill worker {worker_id}")
        return link

    def infos(self, worker_ids: Iterable[str]) -> dict[str, WorkerInfo]:
        """Returns the description of each of ``worker_ids`` that there is a link to, by worker id."""
        return {k: self._links[k].info for k in worker_ids if k in self._links}

    def sync(self, infos: Mapping[str, WorkerInfo]) -> None:
        """Opens links to new workers of ``infos``, and drops those of replaced or missing workers once they are
        down.

        A link that is up stays, whatever ``infos`` says. A link that is down is reopened when there is a new
        certificate.
        """
        for worker_id, info in infos.items():
            link = self._links.get(worker_id)
            if link is not None and link.up and not _same(link.info, info):
                continue  # Redis may be wrong, or early; a worker that was replaced ends our session, or says so
            if link is not None and _same(link.info, info) and not self._outdated(link):
                link.renew(info)
                continue
            if link is not None:
                self._drop(link)
            self._open(info)
        for link in [k for k in self if k.info.worker_id not in infos and not k.up]:
            self._drop(link)

    async def close(self) -> None:
        """Drops all links and waits until every connection is closed."""
        for link in list(self):
            self._drop(link)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _open(self, info: WorkerInfo) -> None:
        kind = DecodeLink if info.role == "decode" else PrefillLink
        self._generations[info.worker_id] = self._dialer.generation
        channel = self._dialer.channel(info.address, options=CHANNEL_OPTIONS)
        link = kind(info, channel, self._settings)
        self._links[info.worker_id] = link
        task = asyncio.create_task(link.run(), name=f"link to {info.worker_id}")
        self._tasks[link] = task
        task.add_done_callback(lambda _: self._tasks.pop(link, None))

    def _outdated(self, link: WorkerLink) -> bool:
        return not link.up and self._generations.get(link.info.worker_id) != self._dialer.generation

    def _drop(self, link: WorkerLink) -> None:
        del self._links[link.info.worker_id]
        self._generations.pop(link.info.worker_id, None)
        task = self._tasks.get(link)
        if task is not None:
            task.cancel()


def _same(a: WorkerInfo, b: WorkerInfo) -> bool:
    return (a.incarnation, a.role, a.address) == (b.incarnation, b.role, b.address)
