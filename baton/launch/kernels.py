"""Tells whether a cluster that starts here has to compile CPU kernels first.

Knows nothing of what waits for them.
"""

from __future__ import annotations

from baton.cluster.config import BatonConfig
from baton.kernels.abi import build, native
from baton.process.children import python


def compilation(config: BatonConfig) -> list[str] | None:
    """Returns the command that compiles the kernels for this machine's CPU, which takes minutes on a small machine.

    Workers of every device need them, because they copy and check blocks by them. None if no worker runs here, or
    the kernels are built already, or can't be built (workers report that).
    """
    if config.ray.address or native.isa() == native.REFERENCE:
        return None
    try:
        return None if build.is_built(native.known(native.isa())) else python("baton.kernels.abi.native")
    except build.BuildError:
        return None
