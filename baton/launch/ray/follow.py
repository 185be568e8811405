"""The numbers of workers that `baton place` keeps: the config's, until somebody asks for others in Redis.

Knows nothing of Ray. It looks in a thread of its own, since placing waits for Ray at times. A baton.toml that
changes (a ConfigMap that `helm upgrade` wrote) is read again; its new numbers override what was asked before. While
Redis is away the numbers stay as they are; until it has answered once, nothing is placed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

from redis.exceptions import RedisError

from baton.cluster.config import BatonConfig, ClusterConfig, load_config
from baton.cluster.membership import connect
from baton.cluster.scale import NumbersInForce, ScaleRequest
from baton.cluster.store.redis_url import masked
from baton.protos.errors import ConfigError

LOOK_S = 0.5  # seconds between two looks at how many workers are asked for
log = logging.getLogger("baton.placer")


class ScaleFollower:
    """Watches Redis and the config file on a thread between ``start`` and ``stop``; ``take`` returns a changed
    config.
    """

    def __init__(self, config: BatonConfig, config_file: str = "") -> None:
        self._config, self._file = config, Path(config_file) if config_file else None
        self._read = self._text()
        self._given: BatonConfig | None = None
        self._latest: BatonConfig | None = None
        self._is_away = False
        self._lock, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), name="follow", daemon=True)

    def start(self) -> None:
        """Starts the thread that watches."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread that watches."""
        self._over.set()
        self._thread.join()

    def take(self) -> BatonConfig | None:
        """Returns the config with the numbers of workers that now hold; None if it hasn't changed since the last
        call.

        Never blocks.
        """
        with self._lock:
            latest, self._latest = self._latest, None
            return latest

    async def _watch(self) -> None:
        redis = connect(self._config.redis.url) if self._config.redis.url else None
        follow = None if redis is None else NumbersInForce(redis, self._config.cluster.namespace)
        try:
            while not self._over.is_set():
                self._reread()
                try:
                    self._give(None if follow is None else await follow.look(self._of_config()))
                    self._is_away = False
                except (RedisError, OSError) as error:
                    self._miss(error)
                await asyncio.sleep(LOOK_S)
        finally:
            if redis is not None:
                await redis.aclose()

    def _of_config(self) -> ScaleRequest:
        cluster = self._config.cluster
        return ScaleRequest(cluster.prefill_workers, cluster.decode)

    def _give(self, asked: ScaleRequest | None) -> None:
        config = self._config
        if asked is not None:
            numbers = {"prefill": asked.prefill, "decode": asked.decode}
            cluster = ClusterConfig.model_validate(config.cluster.model_dump() | numbers)
            config = config.model_copy(update={"cluster": cluster})
        if config != self._given:
            self._given = config
            with self._lock:
                self._latest = config

    def _reread(self) -> None:
        text = self._text()
        if not text or text == self._read:
            return
        self._read = text
        try:
            config = load_config(str(self._file))
        except ConfigError as error:
            log.warning("%s is not taken up: %s", self._file, error.message)
            return
        before = self._config
        kept = {"namespace": before.cluster.namespace, "run_dir": before.cluster.run_dir}
        cluster = config.cluster.model_copy(update=kept)  # who is placed already counts on these
        self._config = config.model_copy(
            update={"cluster": cluster, "redis": before.redis, "ray": before.ray},
        )

    def _text(self) -> bytes:
        try:
            return self._file.read_bytes() if self._file is not None else b""
        except OSError:
            return b""

    def _miss(self, error: Exception) -> None:
        if not self._is_away:
            then = "nothing is placed until it is back" if self._given is None else "the numbers stay as they are"
            log.warning("Redis is away at %s, %s: %s", masked(self._config.redis.url), then, error)
        self._is_away = True
