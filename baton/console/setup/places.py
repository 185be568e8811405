"""Checks of the files and folders that a configuration names, on this machine. Nothing is started or made.

Knows nothing of what is in them beyond what tells a right one from a wrong one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import structs

from baton.cluster.config import BatonConfig, WorkerConfig
from baton.console.setup.findings import Finding, tried
from baton.engine.adapters import peft_config, tensors
from baton.engine.adapters.directory import opened
from baton.engine.backends.ranks.hosts.control import read_key
from baton.engine.checkpoints.hub import known_place
from baton.engine.speculate.names import model_of, speculator_names
from baton.launch.servable import workers_of
from baton.process.output_files import unwritable
from baton.protos.errors import ConfigError

BUCKET = "s3://"  # a shared tier that is no folder


def files_of(config: BatonConfig) -> list[Finding]:
    """Returns findings on the files that the configuration names and that must be on this machine."""
    named = {
        "router.keys_file": config.router.keys_file,
        **{
            f"tls.{key}": getattr(config.tls, key)
            for key in ("dir", "cert", "key", "ca", "public_cert", "client_ca")
        },
        "redis.ca": config.redis.ca,
    }
    found = []
    for key, path in named.items():
        where = os.path.expanduser(path)
        if path and os.access(where, os.R_OK):
            found.append(Finding(key, "ok", path))
        elif path:
            what = "can't be read" if os.path.exists(where) else "no such file"
            remedy = "`baton keys add TENANT` makes one" if key == "router.keys_file" else "`baton certs make DIR`"
            found.append(Finding(key, "fail", f"{path}: {what}", remedy))
    return found


def keys_of(config: BatonConfig) -> list[Finding]:
    """Returns the finding on the file of API keys, if the configuration names one."""
    return [found for found in files_of(config) if found.subject == "router.keys_file"]


def places_of(config: BatonConfig) -> list[Finding]:
    """Returns findings on what workers and router will read or write here: adapters, models that draft, tiers of
    cached blocks, the key of ranks, the trace. None is of what isn't named.
    """
    found = [finding for worker in workers_of(config) for finding in places_of_worker(worker)]
    if path := config.router.trace_file:
        takes = _takes_file if config.router.processes == 1 else _takes_new_file  # of several each has its own
        found.append(tried("router.trace_file", partial(takes, path)))
    return [*dict.fromkeys(found), *_root(config.adapters.root)]


def places_of_worker(worker: WorkerConfig) -> list[Finding]:
    """Returns findings on what a worker with these settings will read or write here."""
    return [tried(key, partial(check, path)) for key, path, check in _of_worker(worker)]


def _root(path: str) -> list[Finding]:
    """Returns the finding on the folder of adapters that are loaded later, which may be mounted later, too."""
    if not path:
        return []
    found = tried("adapters.root", partial(_is_folder, path))
    return [found if found.state == "ok" else structs.replace(found, state="warn", remedy="make or mount it")]


def _of_worker(worker: WorkerConfig) -> Iterator[tuple[str, str, Callable[[str], str]]]:
    """Yields key, path and check of each place that a worker's settings name."""
    for name, path in worker.adapters.items():
        yield f"worker.adapters.{name}", path, _is_adapter
    with suppress(ConfigError):  # an unknown name is another finding
        for model in filter(None, map(model_of, speculator_names(worker.speculation))):
            yield "worker.speculation", model, known_place
    if worker.rank_key_file:
        yield "worker.rank_key_file", worker.rank_key_file, _is_key
    if worker.disk_tier_bytes:
        yield "worker.disk_tier_dir", worker.disk_tier_dir, _takes_files
    if worker.shared_tier and not worker.shared_tier.startswith(BUCKET):
        yield "worker.shared_tier", worker.shared_tier, _takes_files
    if worker.cache_dir:
        yield "worker.cache_dir", worker.cache_dir, _takes_files


def _is_adapter(path: str) -> str:
    with opened(path) as files:
        peft_config.read_config(files)
        with files.open(tensors.FILE):
            return path


def _is_folder(path: str) -> str:
    if not Path(path).expanduser().is_dir():
        raise ConfigError(f"{path}: no such directory", "path")
    return path


def _is_key(path: str) -> str:
    read_key(path)
    return path


def _takes_file(path: str) -> str:
    """Returns ``path`` if it can be written: a new file, or what is there, also a pipe or a device."""
    there = Path(path).expanduser()
    return path if there.exists() and not there.is_dir() and os.access(there, os.W_OK) else _takes_new_file(path)


def _takes_new_file(path: str) -> str:
    file = Path(path).expanduser()
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"{path}: it must be a file in a folder that is there", "path")
    return _takes_files(str(file.parent)) and path


def _takes_files(path: str) -> str:
    if why := unwritable(Path(path).expanduser()):
        raise ConfigError(f"{path}: {why}", "path")
    return path
