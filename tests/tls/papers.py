"""Makes certificates for tests: a CA with every role, a stranger's CA, and leaves that are over or not ours."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from baton.tls.authority import Authority
from baton.tls.identity import Identity, TlsFiles, only_roles


@functools.cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """Kept until the test process ends."""
    return tempfile.TemporaryDirectory(prefix="bt-")


@functools.cache
def authority(name: str = "ours") -> Authority:
    """A CA with a leaf for each role, one that is over ("expired") and one without a role ("nobody")."""
    made = Authority(Path(scratch().name) / name)
    made.make()
    made.issue("expired", ["worker.baton.internal", "router.baton.internal", "localhost", "127.0.0.1"], days=-1)
    made.issue("nobody", ["somebody.example"])
    return made


def files(role: str, ca: str = "ours", of: str = "ours") -> TlsFiles:
    """The leaf ``role`` of CA ``of``, trusting CA ``ca``."""
    folder, trusted = authority(of).folder, authority(ca).folder
    return TlsFiles(str(folder / f"{role}.crt"), str(folder / f"{role}.key"), str(trusted / "ca.crt"))


def identity(role: str = "worker", where: str = "a port", roles: tuple[str, ...] = (), **which: str) -> Identity:
    """Returns an identity that is ready to use; only ``roles`` may connect, if any are named."""
    found = files(role, **which)
    return Identity(found, where, only_roles(found, roles)) if roles else Identity(found, where)
