"""Seeds each test; starts a real Redis server for whoever asks, flushed between tests."""

import gc
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from xdist.scheduler import LoadFileScheduling

from baton.cluster.membership import connect
from baton.engine.load import QUIET_THREADS
from baton.launch.redis_server import RedisServer
from baton.process.processes import end_sessions
from baton.worker.slots import close_slots, holders
from tests import cpu_times, rewriting, seeds, warm

NO_AUTHORITY = Path(__file__).parent / "data/no_authority.pem"
"""A certificate that signs nothing, because an HTTP client reads the public ones for 28 ms, and none is called."""

WAITING = (
    "e2e/test_serve",
    "launch/ray/",
    "e2e/test_rolling",
    "e2e/test_migration",
    "e2e/test_parity_matrix",
    "e2e/test_rerole",
    "e2e/test_controller",
    "e2e/test_adapter_api",
    "router/dashboard/",
    "e2e/",
    "worker/",
    "launch/",
    "kv/transport/test_nccl",
    "conformance/test_cluster",
    "conformance/test_encoder",
    "bench/test_peers",
    "router/test_survival",
    "router/test_overload",
)
"""How paths of files begin, below ``tests``, that mostly wait for other processes; the longest first."""
SOURCES_READ = "tests/docs/"  # whose tests parse most of our sources
COLLECT_AFTER = 20_000  # objects that are new, in each process of tests
LAST_SHARE = 0.15  # of the files that compute is dealt after the last that waits, because nobody may end alone


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(cpu_times.OPTION, action="store_true", help="print what CPU time each file of tests cost")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until all is collected: what is imported stays
    os.environ.setdefault("SSL_CERT_FILE", str(NO_AUTHORITY))
    os.environ.setdefault(*QUIET_THREADS)  # before torch is imported: spinning threads take the others' cores
    if config.getoption(cpu_times.OPTION):
        config.pluginmanager.register(cpu_times.CpuTimes())
    if config.getoption("numprocesses", None):
        warm.share()
    seeds.choose_examples()
    seeds.seed_all(seeds.run_seed())  # for what modules draw while they are collected


def pytest_sessionstart(session: pytest.Session) -> None:
    rewriting.rewrite_share(session.config, Path(__file__).parent)


def pytest_report_header() -> str:
    return f"seed: {seeds.ENV}={seeds.run_seed()}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deals files that wait in between those that compute, so that neither cores nor processes stand still."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    waiting = sorted((file for file in files if _waits(file) < len(WAITING)), key=_waits)
    computing = [file for file in files if _waits(file) == len(WAITING)]
    every = max(1.0, (1 - LAST_SHARE) * len(computing) / max(1, len(waiting)))
    at = {file: number * every for number, file in enumerate(waiting)}
    at |= {file: number + 0.5 for number, file in enumerate(computing)}
    items[:] = [item for file in sorted(files, key=at.__getitem__) for item in files[file]]


def _waits(file: str) -> int:
    return next((at for at, part in enumerate(WAITING) if f"tests/{part}" in file), len(WAITING))


def pytest_collection_finish() -> None:
    """Leave what was imported out of garbage collections: a full one would walk millions of objects."""
    gc.freeze()  # not collected first: there is little garbage, and looking for it took a second in each process
    gc.set_threshold(COLLECT_AFTER)  # a fifth of what computes much in Python was spent in collections
    gc.enable()


class FilesTogether(LoadFileScheduling):
    """Deals each file's tests to one process, and those that read our sources to one that parses them once."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return SOURCES_READ if file.startswith(SOURCES_READ) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether | None:
    return FilesTogether(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seeds.seed_all(seeds.test_seed(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"{seeds.ENV}={seeds.run_seed()} {item.nodeid}"))
    return report


@pytest.fixture
def settled_heap() -> None:
    """Freezes what other tests have left: a full collection would walk it all and hold the lock, like a stall."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def helm_engine() -> None:
    """Loads the Helm engine with the first test that needs it: what needs none is collected without it."""
    pytest.importorskip("helm_python")


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:  # unix sockets end at 107 bytes
        running = RedisServer(Path(folder)).start()
        yield running
        running.stop()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator[Redis]:
    if server.pid is None:  # a test before stopped it
        server.start()
    client = connect(server.url)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder for slots (unix sockets end at 107 bytes), with no process left behind."""
    with tempfile.TemporaryDirectory(prefix="bt-") as name:
        yield Path(name)
        close_slots(name)
        end_sessions([pid for pid in holders(name).values() if pid != os.getpid()], 0.0)
