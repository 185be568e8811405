"""Fills an existing Ray cluster with workers, and leaves them running when it goes.

Runs in the head pod of a RayCluster. Placement is that of ``baton serve`` with other settings: workers are lasting
actors, Ray may be silent longer, and each slot runs ``baton worker`` with the settings of its node (baton.toml and
environment there). Knows nothing of models, of placement itself, nor of who says how many (``follow``).
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from baton.cluster.config import BatonConfig
from baton.launch.plans import cards_of, config_of, in_pool, slots_of
from baton.launch.ray.app import PlacementSpec, RayPlacement
from baton.launch.ray.follow import ScaleFollower
from baton.launch.supervise import HostPlan
from baton.process.security import ray_environment
from baton.protos.errors import ConfigError

POLL_S = 0.5  # seconds between two looks at how many workers are asked for
SILENT_S = 60.0  # Ray itself doesn't answer for so long: whoever started us starts us again
log = logging.getLogger("baton.placer")


def plans_of(config: BatonConfig, config_file: str) -> list[HostPlan]:
    """Returns one plan per slot, each running ``baton worker`` with ``config_file`` ("": none).

    Raises ConfigError.
    """
    if not config.ray.address:
        raise ConfigError("ray.address is empty: name the Ray cluster to place workers in", "ray.address")
    if not config.cluster.run_dir:
        raise ConfigError(
            "cluster.run_dir is empty: name the folder that each node keeps slots in", "cluster.run_dir"
        )
    folder, named = Path(config.cluster.run_dir), ("--config", config_file) if config_file else ()
    return [
        in_pool(
            config,
            HostPlan(
                slot,
                role,
                "",
                str(folder / "slots"),
                str(folder / "logs" / f"{slot}.log"),
                (sys.executable, "-m", "baton", "worker", "--role", role, "--slot", slot, *named),
                cards=cards_of(config_of(config, slot, role).worker),
            ),
        )
        for slot, role in slots_of(config)
    ]


def run_placer(config: BatonConfig, config_file: str) -> int:
    """Places workers until SIGTERM or SIGINT; returns the exit status, 0. Raises ConfigError and StartupError."""
    logging.basicConfig(level=config.telemetry.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    placement, follow = (
        RayPlacement(spec_of(config, plans_of(config, config_file))),
        ScaleFollower(config, config_file),
    )
    log.info("in Ray at %s", placement.connect())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())  # after Ray, which installs its own
    follow.start()
    try:
        _keep_placing(placement, follow, stop, config_file)
    finally:
        follow.stop()
        placement.close()
    return 0


def _keep_placing(placement: RayPlacement, follow: ScaleFollower, stop: threading.Event, config_file: str) -> None:
    """Places as many workers as are requested, until ``stop`` is set. Before that is known nobody is placed, and
    nobody sent away.
    """
    known = False
    while not stop.wait(POLL_S):
        if (wanted := follow.take()) is not None:
            known = True
            log.info("prefill %d, decode %d", wanted.cluster.prefill, wanted.cluster.decode)
            placement.scale(plans_of(wanted, config_file))
        if not known:
            continue
        placement.tend()
        for status in placement.changes():
            why = f": {status.error.message}" if status.error else ""
            log.info("%s %s %s%s", status.slot, status.state, status.address, why)


def spec_of(config: BatonConfig, plans: Sequence[HostPlan]) -> PlacementSpec:
    """Returns the placement spec of the plans, with workers that outlive this process."""
    return PlacementSpec(
        plans=tuple(plans),
        temp_dir="",
        address=config.ray.address,
        auth_mode=config.ray.auth_mode,
        gpus=config.worker.device == "cuda",
        environment=ray_environment(config),
        strategy=config.ray.placement,
        drain_s=config.worker.drain_grace_s,
        lasting=True,
        lost_s=SILENT_S,
        namespace=config.cluster.namespace,
    )
