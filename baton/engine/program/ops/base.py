"""Defines the base class of ops.

Knows no op.
"""

from __future__ import annotations

import msgspec


class BaseOp(msgspec.Struct, frozen=True, tag=True):
    """Is the base of the members of ``Op``; an op's msgspec tag is its class name."""
