"""Holds what every op is.

Knows no op.
"""

from __future__ import annotations

import msgspec


class BaseOp(msgspec.Struct, frozen=True, tag=True):
    """Stands for a member of ``Op``; its tag is the op's class name."""
