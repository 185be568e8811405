"""``[adapters]``: which LoRA adapters may be loaded beside a model, and how many.

Knows nothing of files or of who asks.
"""

from __future__ import annotations

from pydantic import Field

from baton.cluster.sections.base import Section


class AdaptersConfig(Section):
    """Bounds the LoRA adapters that a worker holds, and says from where they may be loaded while it runs.

    Those that are always loaded are named in ``worker.adapters``.
    """

    root: str = Field(
        default="", description="directory beneath which adapters may be loaded while serving; empty: none may"
    )
    max_loaded: int = Field(default=16, ge=0, le=4096, description="adapters that a worker holds at once")
    max_bytes: int = Field(default=1 << 30, ge=0, description="what their matrices may take, per worker")
    max_rank: int = Field(default=64, ge=1, le=256, description="of one adapter")
    max_served: int = Field(
        default=1024, ge=0, le=65536, description="names that routers serve; workers load them as requests come"
    )
    max_per_tenant: int = Field(default=0, ge=0, description="of these, that belong to one tenant; 0: any number")
