"""Two network namespaces as two hosts, joined by a plain cable or by a rough one (rough_link.py).

Knows nothing of what runs on them. What a namespace can't separate is set apart by hand: each host has a boot id of
its own, so that nobody takes the other for a process of the same machine and offers shared memory.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.rough_link import OneWay, Roughness, running

NEAR, FAR = "baton-near", "baton-far"
ADDRESS = {NEAR: "10.231.77.1", FAR: "10.231.77.2"}
ENDS = {NEAR: "baton-a", FAR: "baton-b"}


class Impossible(Exception):
    """Namespaces can't be had here; the text says why."""


@contextlib.contextmanager
def two_hosts(rough: Roughness | None = None) -> Iterator[tuple[OneWay, ...]]:
    """Both namespaces and what joins them, while the block runs; a rough link's figures. Raises Impossible."""
    if os.geteuid() != 0:
        raise Impossible("network namespaces need root")
    _remove()
    try:
        for name in (NEAR, FAR):
            _do(f"ip netns add {name}")
        if rough is None:
            _do(f"ip link add {ENDS[NEAR]} type veth peer name {ENDS[FAR]}")
            _join()
            yield ()
            return
        try:
            relay = running(rough, (ENDS[NEAR], ENDS[FAR]))
        except OSError as error:
            raise Impossible(f"no TUN devices here: {error}") from None
        with relay as ways:
            _join()
            yield ways
    finally:
        _remove()


def _join() -> None:
    """Each host gets its end, as an interface with its address."""
    for name, end in ENDS.items():
        peer = ADDRESS[FAR if name == NEAR else NEAR]
        _do(f"ip link set {end} netns {name}")
        _do(f"ip -n {name} addr add {ADDRESS[name]} peer {peer} dev {end}")
        _do(f"ip -n {name} link set {end} up")
        _do(f"ip -n {name} link set lo up")


def _do(command: str) -> None:
    try:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", "") or error
        raise Impossible(f"`{command}`: {str(why).strip()}") from None


def _remove() -> None:
    for name in (NEAR, FAR):
        with contextlib.suppress(OSError):
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def start_on(
    host: str, folder: Path, name: str, arguments: list[str], env: dict[str, str]
) -> subprocess.Popen[bytes]:
    """Python with ``arguments`` on ``host``, in a session of its own; it writes to ``folder``/``name``.log."""
    boot = folder / f"{host}.boot"
    boot.write_text(f"{host}\n")
    inside = 'mount --bind "$0" /proc/sys/kernel/random/boot_id 2>/dev/null; exec "$@"'
    command = ["ip", "netns", "exec", host, "sh", "-c", inside, str(boot), sys.executable, *arguments]
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            command, cwd=folder, env={**os.environ, **env}, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip


def listening(host: str) -> list[str]:
    """Addresses on which anything listens in a namespace."""
    done = subprocess.run(["ip", "netns", "exec", host, "ss", "-Hltn"], capture_output=True, text=True, check=False)
    return sorted(re.sub(r"^\[::ffff:(.*)\]", r"\1", line.split()[3]) for line in done.stdout.splitlines())
