"""Which build this is, which protocol it speaks, and with which others it runs.

A protocol is MAJOR.MINOR. A minor version only adds fields and calls that the other side may not know, so that
builds one minor version apart run together: what a rolling upgrade needs. Further apart, or of another major
version, they refuse one another by name. Knows nothing of connections.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed

PROTOCOL = "1.1"


@cache
def product_version() -> str:
    """Returns the installed version; "0+unknown" where it runs from a bare checkout."""
    try:
        return installed("baton-serve")
    except PackageNotFoundError:
        return "0+unknown"


def runs_with(theirs: str, ours: str = "") -> bool:
    """Tells whether the two protocols may meet; an empty ``ours`` is this build's. What can't be read may not."""
    one, other = _parts(ours or PROTOCOL), _parts(theirs)
    return one is not None and other is not None and one[0] == other[0] and abs(one[1] - other[1]) <= 1


def refusal(who: str, theirs: str, build: str = "") -> str:
    """Returns what to tell people where two protocols may not meet."""
    made = f" (baton {build})" if build else ""
    return (
        f"{who}{made} speaks protocol {theirs or 'unknown'}, this process (baton {product_version()}) {PROTOCOL}: "
        "only builds of one major and neighbouring minor versions run together; upgrade one version at a time"
    )


def _parts(protocol: str) -> tuple[int, int] | None:
    major, _, minor = protocol.partition(".")
    return (int(major), int(minor)) if major.isdecimal() and minor.isdecimal() else None
