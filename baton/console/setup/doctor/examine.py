"""All checks of ``baton doctor``, in the order in which they are shown."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from baton.cluster.config import BatonConfig, load_config
from baton.console.setup.doctor import machine, services
from baton.console.setup.findings import Finding
from baton.protos.errors import BatonError

Look = Callable[[BatonConfig], Finding | Sequence[Finding]]
LOOKS: dict[str, Look] = {
    "cpu": machine.cores,
    "memory": machine.memory,
    "huge pages": lambda _: machine.huge_pages(),
    "limits": machine.limits,
    "clock": lambda _: machine.clock(),
    "mtu": lambda _: machine.mtu(),
    "kernels": lambda _: machine.compiler(),
    "gpu": machine.gpu,
    "torch": services.packages,
    "model": services.model,
    "ports": services.ports,
    "tls": services.certificates,
    "redis": services.redis_server,
    "handovers": services.handovers,
    "ray": services.ray,
    "kv": lambda _: services.transports(),
}


def examine(config_path: str | None, quick: bool) -> list[Finding]:
    """Returns the findings of all checks; ``quick`` leaves out those that take seconds.

    A configuration that is wrong is the only finding.
    """
    try:
        config = load_config(config_path)
    except BatonError as error:
        return [
            Finding("config", "fail", error.message, "`baton check -f FILE`; docs/configuration.md has every key")
        ]
    found: list[Finding] = []
    for name, look in LOOKS.items():
        if not (quick and name == "kv"):
            found += _looked(name, look, config)
    return found


def _looked(name: str, look: Look, config: BatonConfig) -> Sequence[Finding]:
    """An examination that breaks is a finding too: the others go on."""
    try:
        seen = look(config)
    except Exception as error:
        what = f"could not be looked at: {type(error).__name__}: {error}"
        return [Finding(name, "warn", what, "look at it by hand; the other findings stand")]
    return [seen] if isinstance(seen, Finding) else seen
