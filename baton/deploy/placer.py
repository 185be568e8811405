"""Fills a Ray cluster that others started with workers, and leaves them running when it goes.

What runs in the head pod of a RayCluster. A worker is a detached actor, named after its slot, that supervises
``baton worker`` where Ray put it; its settings are those of the node it is on (its baton.toml and environment).
A slot that is not wanted any more is drained and ended, one at a time. Knows nothing of models.
"""

from __future__ import annotations

import hashlib
import logging
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

from baton.cluster.config import BatonConfig
from baton.deploy.plans import slots_of
from baton.deploy.ray_app import Placement, PlacementSpec, WorkerActor, resource_of
from baton.deploy.security import ray_environment
from baton.deploy.supervise import HostPlan, SlotStatus
from baton.protos.errors import ConfigError, StartupError

POLL_S = 1.0
ANSWER_S = 5.0
SILENT_S = 60.0  # Ray itself doesn't answer for so long: whoever started us starts us again
log = logging.getLogger("baton.placer")


def plans_of(config: BatonConfig, config_file: str) -> list[HostPlan]:
    """One plan per slot. Raises ConfigError."""
    if not config.ray.address:
        raise ConfigError("ray.address is empty: name the Ray cluster to place workers in", "ray.address")
    if not config.cluster.run_dir:
        raise ConfigError(
            "cluster.run_dir is empty: name the folder that each node keeps slots in", "cluster.run_dir"
        )
    folder = Path(config.cluster.run_dir)
    return [
        HostPlan(
            slot,
            role,
            "",
            str(folder / "slots"),
            str(folder / "logs" / f"{slot}.log"),
            (sys.executable, "-m", "baton", "worker", "--role", role, "--slot", slot)
            + (("--config", config_file) if config_file else ()),
        )
        for slot, role in slots_of(config)
    ]


def run_placer(config: BatonConfig, config_file: str) -> int:
    """Until SIGTERM or SIGINT; the exit status. Raises ConfigError and StartupError."""
    logging.basicConfig(level=config.telemetry.log_level.upper(), format="%(asctime)s %(name)s %(message)s")
    plans = tuple(plans_of(config, config_file))
    gpus, own = config.worker.device == "cuda", ray_environment(config)
    spec = PlacementSpec(plans, "", config.ray.address, config.ray.auth_mode, gpus=gpus, environment=own)
    connection = Placement(spec)
    log.info("in Ray at %s", connection.connect())
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())  # after Ray, which installs its own
    try:
        Crew(connection.ray, spec, config.worker.drain_grace_s).keep(stop)
    finally:
        connection.close()
    return 0


class Crew:
    """The actors of ``spec``'s slots, in a Ray that is connected (``ray``, the module)."""

    def __init__(self, ray: Any, spec: PlacementSpec, drain_s: float) -> None:
        self._ray, self._spec, self._drain_s = ray, spec, drain_s
        self._known: dict[str, SlotStatus] = {}
        self._heard = time.monotonic()

    def keep(self, stop: threading.Event) -> None:
        """Place what is missing, end what is not wanted, say what changes. Raises StartupError when Ray is gone."""
        wanted = {actor_name(plan): plan for plan in self._spec.plans}
        while not stop.wait(0.0 if not self._known else POLL_S):
            present = {name for name in self._ray.util.list_named_actors() if name.startswith("baton/")}
            for name in sorted(present - set(wanted)):
                self._end(name)
            for name, plan in wanted.items():
                if name not in present:
                    self._place(name, plan)
            self._look(wanted)

    def _place(self, name: str, plan: HostPlan) -> None:
        remote = self._ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(WorkerActor)
        options: dict[str, Any] = {"resources": {resource_of(plan.role): 1}, "num_gpus": int(self._spec.gpus)}
        encoded = msgspec.json.encode(plan).decode()
        remote.options(name=name, lifetime="detached", get_if_exists=True, **options).remote(encoded)
        log.info("%s asked for", plan.slot)

    def _end(self, name: str) -> None:
        log.info("%s is not wanted any more: draining", name)
        try:
            actor = self._ray.get_actor(name)
            self._ray.get(actor.stop.remote(self._drain_s), timeout=self._drain_s + ANSWER_S)
            self._ray.kill(actor)
        except (self._ray.exceptions.RayError, ValueError, TimeoutError) as error:
            log.warning("%s could not be ended in order: %s", name, error)

    def _look(self, wanted: dict[str, HostPlan]) -> None:
        for name, plan in wanted.items():
            status = self._status(name, plan)
            if status != self._known.get(plan.slot):
                self._known[plan.slot] = status
                why = f": {status.error.message}" if status.error else ""
                log.info("%s %s %s%s", plan.slot, status.state, status.address, why)

    def _status(self, name: str, plan: HostPlan) -> SlotStatus:
        """ "waiting" while Ray has no room for it."""
        try:
            text = self._ray.get(self._ray.get_actor(name).status.remote(), timeout=ANSWER_S)
        except (self._ray.exceptions.GetTimeoutError, self._ray.exceptions.RayActorError, ValueError):
            return SlotStatus(plan.slot, "waiting")
        except self._ray.exceptions.RayError as error:
            if time.monotonic() - self._heard > SILENT_S:
                raise StartupError(f"Ray answers no more: {error}", "ray.address") from None
            return SlotStatus(plan.slot, "waiting")
        self._heard = time.monotonic()
        return msgspec.json.decode(text, type=SlotStatus)


def actor_name(plan: HostPlan) -> str:
    """Of the slot and of what runs there: another plan is another actor."""
    return f"baton/{plan.slot}/{hashlib.sha256(msgspec.json.encode(plan)).hexdigest()[:12]}"
