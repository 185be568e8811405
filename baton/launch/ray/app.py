"""Ray, private or existing, with an actor per slot that supervises a worker host.

Ray is never on a request's path: if Ray dies the hosts go on, and the actors of the next Ray adopt them by their
slots' locks. Knows nothing of what a host serves, nor of which node a slot is on (``seats``).
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType

import msgspec

from baton.launch.ray.seats import Seats, resource_of
from baton.launch.supervise import HostPlan, SlotStatus
from baton.protos.errors import ConfigError, StartupError

PLACE_S = 20.0  # seconds in which nodes with room have to appear
FIRST_S = 120.0  # seconds for the first answer of any actor: a busy machine takes long to start their processes
SEATS = 1024  # workers of a role that a private Ray lets this machine run: the machine is its owner's business


class PlacementSpec(msgspec.Struct, frozen=True):
    """Names the slots to fill, and the Ray cluster to fill them in (``address`` "": a private one)."""

    plans: tuple[HostPlan, ...]
    temp_dir: str
    address: str = ""
    auth_mode: str = "token"
    object_store_bytes: int = 80 << 20
    gpus: bool = False
    environment: dict[str, str] = {}  # set for every Ray process in addition: Ray's own TLS
    strategy: str = "peers"  # one of ``node_choice.STRATEGIES``
    drain_s: float = 2.0  # seconds that a host takes to drain when it is told to leave
    lasting: bool = False  # workers outlive this connection, and the next one finds them
    lost_s: float = 5.0  # seconds without an answer from any actor, after a first one, and Ray counts as gone
    must_fit: bool = True  # a slot without room is an error: of a cluster that starts, not of one that ran
    namespace: str = "baton"  # of the cluster: another cluster's lasting workers in the same Ray aren't found


def quiet_environment(spec: PlacementSpec) -> dict[str, str]:
    """Returns variables that every Ray process of the cluster inherits; set them before Ray is imported.

    They turn off usage statistics, metrics and prestarted workers, and set the token of a private cluster. Workers
    get the priority of any other process: Ray's own choice is a niceness of 15, with which an engine starves beside
    whatever else the machine runs, the router included.
    """
    quiet = {
        "RAY_AUTH_MODE": spec.auth_mode,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_enable_worker_prestart": "0",
        "RAY_prestart_worker_first_driver": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_kill_child_processes_on_worker_exit": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_worker_niceness": "0",
    }
    if not spec.address:
        quiet["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # Ray's own switch for listening on loopback alone
    if not spec.address and spec.auth_mode == "token" and "RAY_AUTH_TOKEN" not in os.environ:
        quiet["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return quiet | spec.environment


class RayPlacement:
    """Connects to Ray and keeps one actor per slot. Use it from one thread, and ``close`` it."""

    def __init__(self, spec: PlacementSpec, clock: Callable[[], float] = time.monotonic) -> None:
        self._spec, self._clock = spec, clock
        self._silent, self._heard = 0.0, False
        self.ray = _import_ray(spec)
        self._seats = Seats(self.ray, spec.strategy, spec.gpus, spec.drain_s, clock, lasting=spec.lasting)
        self._shown: dict[str, SlotStatus] = {}

    def connect(self) -> str:
        """Starts a private Ray or joins the one at the spec's ``address``; returns its address.

        Raises StartupError.
        """
        try:
            context = self.ray.init(**self._join() if self._spec.address else self._private())
        except Exception as error:  # Ray's own time-outs are of no narrower kind
            raise StartupError(_not_connected(self._spec, error)) from None
        return str(context.address_info["gcs_address"])

    def place(self) -> None:
        """Seats every slot on a node. Raises ConfigError if some have no room after PLACE_S, unless those wait
        (``must_fit``).
        """
        self._seats.want(self._spec.plans)
        self._seats.patient = not self._spec.must_fit
        deadline = self._clock() + PLACE_S
        self._seats.tend()
        while self._spec.must_fit and (missing := self._seats.unseated()):
            if self._clock() > deadline:
                raise _no_room(missing, self._spec.gpus)
            time.sleep(0.2)
            self._seats.tend()
        self._seats.patient = True

    def scale(self, plans: Sequence[HostPlan]) -> None:
        """Sets the slots wanted from now on: ``tend`` places new ones as there is room, and drains and ends
        others.
        """
        self._seats.want(plans)

    def tend(self) -> None:
        """Replaces slots whose node has gone, and continues pending changes. Call it every second or more often."""
        self._seats.tend()

    def where(self) -> Mapping[str, str]:
        """Returns slot -> id of its node."""
        return self._seats.where()

    def statuses(self) -> dict[str, SlotStatus]:
        """Returns slot -> status; a slot whose actor doesn't answer keeps its last one.

        Raises StartupError if no actor has answered for ``lost_s`` seconds, or FIRST_S before the first answer.
        """
        found, answered = self._seats.statuses()
        self._heard = self._heard or answered
        patience = self._spec.lost_s if self._heard else max(FIRST_S, self._spec.lost_s)
        if answered or not self._seats.where():
            self._silent = 0.0
        elif self._silent and self._clock() - self._silent > patience:
            raise StartupError(f"Ray doesn't answer: none of its actors did for {patience:.0f} s")
        else:
            self._silent = self._silent or self._clock()
        return found

    def changes(self) -> list[SlotStatus]:
        """Returns the statuses that changed since the last call. Raises as ``statuses`` does."""
        now = self.statuses()
        changed = [status for slot, status in now.items() if self._shown.get(slot) != status]
        self._shown = now
        return changed

    def stop_hosts(self, grace_s: float) -> None:
        """Ends every worker host through its actor; blocks for ``grace_s`` + 1 seconds at most."""
        self._seats.stop_all(grace_s)

    def close(self) -> None:
        """Disconnects from Ray; a private Ray ends."""
        self.ray.shutdown()

    def _private(self) -> dict[str, object]:
        room = {resource_of(role): SEATS for role in ("prefill", "decode")}
        room |= {name: SEATS for plan in self._spec.plans for name in plan.resources if name not in ("CPU", "GPU")}
        return {
            "address": "local", "num_cpus": 1, "resources": room, "include_dashboard": False,
            "object_store_memory": self._spec.object_store_bytes,
            "_temp_dir": self._spec.temp_dir, "namespace": self._spec.namespace, **_QUIET,
        }  # fmt: skip

    def _join(self) -> dict[str, object]:
        return {"address": self._spec.address, "namespace": self._spec.namespace, **_QUIET}


_QUIET = {"log_to_driver": False, "logging_level": "ERROR"}


def _import_ray(spec: PlacementSpec) -> ModuleType:
    os.environ.update(quiet_environment(spec))
    try:
        import ray
    except ImportError:
        raise StartupError("Ray is not installed: pip install 'baton-serve[ray]'") from None
    return ray


def _not_connected(spec: PlacementSpec, error: Exception) -> str:
    """Returns in words that Ray couldn't be started or joined, with what can be done about it."""
    if not spec.address:
        return (
            f"can't start Ray: {error} On a busy machine a second try may do, or the --ray-address of a running one"
        )
    return (
        f"can't join Ray at {spec.address}: {error}. RAY_AUTH_MODE ({spec.auth_mode}) and the token must be the "
        "same on every node; set --ray-address and [ray] auth_mode"
    )


def _no_room(missing: Sequence[HostPlan], gpus: bool) -> ConfigError:
    asked = "; ".join(f"{plan.slot}: {_needs_of(plan, gpus)}" for plan in missing)
    example = json.dumps(missing[0].resources or {resource_of(missing[0].role): 1})
    return ConfigError(
        f"no room in the Ray cluster for {asked}. Nodes offer it when started with, for example, "
        f"`ray start --address … --resources '{example}'`",
        "ray.address",
    )


def _needs_of(plan: HostPlan, gpus: bool) -> str:
    """Returns in words what a request asks for: resources, how often, and the labels that a node must carry."""
    needs = plan.resources or {resource_of(plan.role): 1}
    words = ", ".join(f"{amount * plan.gang:g} {name}" for name, amount in sorted(needs.items()))
    if gpus and "GPU" not in needs:
        words += ", a GPU or its share of one" if plan.cards == 1 else f", {plan.cards} GPUs, one per rank"
    gang = f" on each of {plan.hosts} nodes" if plan.hosts > 1 else " all on one node" if plan.gang > 1 else ""
    labels = ", ".join(f"{name}={value}" for name, value in sorted(plan.labels.items()))
    return f"{words}{gang}" + (f" labelled {labels}" if labels else "")
