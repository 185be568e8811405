"""Versions: this build's, the protocol that it speaks, and which protocols can work together.

A protocol is MAJOR.MINOR. A minor version only adds fields and calls that the other side may not know, so builds
one minor version apart work together, as a rolling upgrade needs. Others refuse one another.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

PROTOCOL = "1.1"


@cache
def product_version() -> str:
    """Returns the installed version of the package; "0+unknown" in a bare checkout."""
    try:
        return installed("baton-serve")
    except PackageNotFoundError:
        return "0+unknown"


def runs_with(theirs: str, ours: str = "") -> bool:
    """Returns whether protocols ``theirs`` and ``ours`` ("": this build's) can work together; False for a malformed
    one.
    """
    one, other = _parts(ours or PROTOCOL), _parts(theirs)
    return one is not None and other is not None and one[0] == other[0] and abs(one[1] - other[1]) <= 1


def refusal(who: str, theirs: str, build: str = "") -> str:
    """Returns the message about process ``who``, whose protocol ``theirs`` can't work with this build's."""
    made = f" (baton {build})" if build else ""
    return (
        f"{who}{made} speaks protocol {theirs or 'unknown'}, this process (baton {product_version()}) {PROTOCOL}: "
        "only builds of one major and neighbouring minor versions run together; upgrade one version at a time"
    )


def _parts(protocol: str) -> tuple[int, int] | None:
    major, _, minor = protocol.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
