"""Where workers run: one Ray actor per slot, placed by role resources, supervising a worker host.

Ray is imported here and nowhere else, and is never on a request's path: when Ray dies the hosts go on, and the
actors of the next Ray adopt them by their slots' locks. Knows nothing of what a host serves.
"""

from __future__ import annotations

import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from baton.deploy.supervise import HostPlan, HostSupervisor, SlotStatus
from baton.protos.errors import ConfigError, StartupError

PLACE_S = 20.0
ANSWER_S = 2.0
LOST_S = 5.0  # a restarted actor answers sooner than this


class PlacementSpec(msgspec.Struct, frozen=True):
    """The slots to fill, and which Ray to fill them with (``address`` empty: a private one)."""

    plans: tuple[HostPlan, ...]
    temp_dir: str
    address: str = ""
    auth_mode: str = "token"
    object_store_bytes: int = 80 << 20
    gpus: bool = False


def resource_of(role: str) -> str:
    """The custom resource that a node offers once per worker of ``role`` it can run."""
    return f"baton_{role}"


def quiet_environment(spec: PlacementSpec) -> dict[str, str]:
    """Variables that every Ray process of the cluster inherits; they must be set before Ray is imported."""
    quiet = {
        "RAY_AUTH_MODE": spec.auth_mode,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_kill_child_processes_on_worker_exit": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    if not spec.address:
        quiet["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's own switch for listening on loopback alone
    if not spec.address:
        quiet["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's own switch for listening on loopback alone
    if not spec.address and spec.auth_mode == "token" and "RAY_AUTH_TOKEN" not in os.environ:
        quiet["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return quiet


class WorkerActor:
    """Supervises the host of one slot. Ray restarts this actor; the host doesn't notice."""

    def __init__(self, plan: str) -> None:
        self._supervisor = HostSupervisor(msgspec.json.decode(plan, type=HostPlan))
        self._supervisor.start()

    def status(self) -> str:
        """A SlotStatus, as JSON."""
        return msgspec.json.encode(self._supervisor.status()).decode()

    def stop(self, grace_s: float) -> None:
        """End the host and start it no more."""
        self._supervisor.stop(grace_s)


class Placement:
    """A connection to Ray with one actor per slot. Use it from one thread; ``close`` it."""

    def __init__(self, spec: PlacementSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._silent = 0.0
        self._actors: dict[str, Any] = {}
        self._last = {plan.slot: SlotStatus(plan.slot, "starting") for plan in spec.plans}
        self._ray = _import_ray(spec)

    def connect(self) -> str:
        """Start a private Ray or join the one at ``address``; returns its address."""
        try:
            context = self._ray.init(**self._join() if self._spec.address else self._private())
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"join Ray at {self._spec.address}" if self._spec.address else "start Ray"
            raise StartupError(
                f"can't {where}: {error}. RAY_AUTH_MODE ({self._spec.auth_mode}) and the token must be the same on "
                "every node; set --ray-address and [ray] auth_mode"
            ) from None
        return str(context.address_info["gcs_address"])

    def place(self) -> None:
        """Reserve a bundle per slot and start its actor there. Raises ConfigError when no node has room."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundles = [self._bundle(plan) for plan in self._spec.plans]
        group = placement_group(bundles, strategy="PACK")
        if not group.wait(PLACE_S):
            raise ConfigError(
                f"no room in the Ray cluster for {_needs(bundles)}: nodes offer it when started with, for example, "
                """`ray start --address … --resources '{"baton_prefill": 1, "baton_decode": 1}'`""",
                "ray.address",
            )
        remote = self._ray.remote(num_cpus=0, max_restarts=-1, max_concurrency=4)(WorkerActor)
        for index, (plan, bundle) in enumerate(zip(self._spec.plans, bundles, strict=True)):
            strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=index)
            custom = {name: amount for name, amount in bundle.items() if name != "GPU"}
            self._actors[plan.slot] = remote.options(
                resources=custom, num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy
            ).remote(msgspec.json.encode(plan).decode())

    def statuses(self) -> dict[str, SlotStatus]:
        """slot -> status; one whose actor doesn't answer is shown as it was. Raises StartupError when none does."""
        asked = {slot: actor.status.remote() for slot, actor in self._actors.items()}
        answers = {slot: status for slot, answer in asked.items() if (status := self._answer(answer))}
        self._last |= answers
        if answers:
            self._silent = 0.0
        elif self._silent and self._clock() - self._silent > LOST_S:
            raise StartupError("Ray answers no more")
        else:
            self._silent = self._silent or self._clock()
        return dict(self._last)

    def _answer(self, answer: Any) -> SlotStatus | None:
        try:
            return msgspec.json.decode(self._ray.get(answer, timeout=ANSWER_S), type=SlotStatus)
        except (self._ray.exceptions.RayError, TimeoutError):
            return None

    def stop_hosts(self, grace_s: float) -> None:
        """End every host through its actor."""
        calls = [actor.stop.remote(grace_s) for actor in self._actors.values()]
        if calls:
            self._ray.wait(calls, num_returns=len(calls), timeout=grace_s + 1)

    def close(self) -> None:
        """Leave Ray; a private one ends."""
        self._ray.shutdown()

    def _private(self) -> dict[str, Any]:
        roles = Counter(resource_of(plan.role) for plan in self._spec.plans)
        return {
            "address": "local", "num_cpus": 1, "resources": dict(roles), "include_dashboard": False,
            "object_store_memory": self._spec.object_store_bytes,
            "_temp_dir": self._spec.temp_dir, **_QUIET,
        }  # fmt: skip

    def _join(self) -> dict[str, Any]:
        return {"address": self._spec.address, **_QUIET}

    def _bundle(self, plan: HostPlan) -> dict[str, float]:
        bundle: dict[str, float] = {resource_of(plan.role): 1}
        if self._spec.gpus:
            # A worker takes a whole GPU, or an equal share where the cluster has fewer GPUs than workers.
            have = self._ray.cluster_resources().get("GPU", 0.0)
            if not have:
                raise ConfigError("--device cuda: Ray sees no GPU here; use --device cpu", "worker.device")
            bundle["GPU"] = min(1.0, int(100 * have / len(self._spec.plans)) / 100)
        return bundle


_QUIET = {"log_to_driver": False, "logging_level": "ERROR", "namespace": "baton"}


def _import_ray(spec: PlacementSpec) -> Any:
    os.environ.update(quiet_environment(spec))
    try:
        import ray
    except ImportError:
        raise StartupError("Ray is not installed: pip install 'baton-serve[ray]'") from None
    return ray


def _needs(bundles: Sequence[dict[str, float]]) -> str:
    total: Counter[str] = Counter()
    for bundle in bundles:
        total.update(bundle)  # type: ignore[arg-type]
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(total.items()))
