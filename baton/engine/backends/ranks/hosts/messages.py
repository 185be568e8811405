"""Defines what a worker's lead and the hosts of its other ranks tell one another.

Knows nothing of connections.
"""

from __future__ import annotations

import msgspec

from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.config import EngineConfig
from baton.protos.errors import ErrorInfo
from baton.tls.identity import TlsFiles


class SessionSpec(msgspec.Struct, frozen=True):
    """Says to a session where it is: this end's IP address and the lead's, and the host's own TLS files."""

    here: str
    there: str
    tls: TlsFiles | None = None


class HostStart(msgspec.Struct, frozen=True, tag=True):
    """Tells a host that it is number ``host``, and to start ranks ``first`` … ``end`` - 1.

    ``kernels`` identifies the sources of the lead's kernels, and ``version`` is its build's: the host's too.
    """

    config: EngineConfig
    host: int
    first: int
    end: int
    kernels: str
    version: str = ""  # empty of builds that don't say


class LeadBuild(msgspec.Struct, frozen=True):
    """Holds what every build's HostStart says of the lead's build, whatever else that has."""

    kernels: str = ""
    version: str = ""


class HostShare(msgspec.Struct, frozen=True, tag=True):
    """Tells a host to make shared memory and KV pages of these sizes in bytes, and to connect its ranks.

    ``sends`` asks for a process that sends KV out of its pages, and receives into them.
    """

    memory: int
    pages: int
    links: LinkPlan
    sends: bool = False


class HostNote(msgspec.Struct, frozen=True, tag=True):
    """Tells a host that the next message is an adapter's note for its ranks, which listen already."""


class HostLoaded(msgspec.Struct, frozen=True, tag=True):
    """Tells the lead that a host has loaded weights of this fingerprint, and takes connections at ``port``."""

    fingerprint: str
    port: int


class HostDone(msgspec.Struct, frozen=True, tag=True):
    """Tells the lead that a host's ranks are connected, or have taken a note; ``port`` is its KV sender's, 0 for
    none.
    """

    port: int = 0


class HostFailed(msgspec.Struct, frozen=True, tag=True):
    """Tells the lead why a host's ranks couldn't start."""

    error: ErrorInfo


class HostLost(msgspec.Struct, frozen=True, tag=True):
    """Tells the lead that rank ``rank`` is gone, or stuck; ``how`` says so in words."""

    rank: int
    how: str


FromLead = HostShare | HostNote
FromHost = HostLoaded | HostDone | HostFailed | HostLost
FROM_LEAD: msgspec.json.Decoder[FromLead] = msgspec.json.Decoder(FromLead)
FROM_HOST: msgspec.json.Decoder[FromHost] = msgspec.json.Decoder(FromHost)
START = msgspec.json.Decoder(HostStart)
LEAD_BUILD = msgspec.json.Decoder(LeadBuild)
