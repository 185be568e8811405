"""``[controller]``: settings of the controller, which watches and changes the prefill:decode ratio.

Knows nothing of its rules.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from baton.cluster.sections.base import Section


class ControllerConfig(Section):
    """Configures the controller of the prefill:decode ratio, which runs in one of the routers.

    Times in seconds; docs/ratio.md says how it decides. The SLOs are those of requests whose context class names
    none.
    """

    mode: Literal["off", "advise", "auto"] = Field(
        default="advise", description="auto changes workers' roles; advise only says what it would do"
    )
    interval_s: float = Field(default=5.0, ge=0.5, le=60, description="between two looks")
    window_s: float = Field(default=20.0, ge=2, le=600, description="of traffic that counts as present")
    ttft_s: float = Field(default=2.0, gt=0, description="wanted to the first token")
    tpot_s: float = Field(default=0.1, gt=0, description="wanted between tokens, in the mean")
    high: float = Field(default=0.85, gt=0, le=2, description="fullness of a role below which nothing is changed")
    least_gain: float = Field(default=0.10, ge=0, le=1, description="of fullness, for a change to be worth it")
    confirm: int = Field(default=2, ge=1, le=20, description="looks in a row that must agree")
    cooldown_s: float = Field(default=10.0, ge=0, description="after a change")
    horizon_s: float = Field(default=30.0, gt=0, description="in which a change must pay, and queues be done")
    most_moves: int = Field(default=2, ge=1, le=64, description="workers that change at once")
    error_bound: float = Field(
        default=0.5,
        gt=0,
        description="error of its simulation against what was measured, above which it gives no advice",
    )
    grace_s: float = Field(default=1.0, ge=0, le=600, description="for prompts being read when a worker changes")
    dial_s: float = Field(default=60.0, ge=0, description="between simulations of every ratio; 0: none")
    most_workers: int = Field(
        default=0, ge=0, le=1024, description="workers that it may add up to; 0: it adds and removes none"
    )
    least_workers: int = Field(default=2, ge=2, le=1024, description="workers below which it removes none")
    low: float = Field(default=0.5, gt=0, le=2, description="fullness without a worker, below which one is removed")
    scale_confirm: int = Field(
        default=3, ge=1, le=100, description="looks in a row that must ask for a worker more"
    )
    scale_down_looks: int = Field(default=12, ge=1, le=1000, description="looks in a row, for a worker less")
    scale_cooldown_s: float = Field(default=60.0, ge=0, description="after a worker was added or removed")
    payback_s: float = Field(
        default=300.0, gt=0, description="in which a worker more must pay for its start; none is removed sooner"
    )
    start_s: float = Field(default=60.0, ge=0, description="that a worker takes to start, until it was measured")

    @model_validator(mode="after")
    def _bounds(self) -> ControllerConfig:
        if self.most_workers and self.most_workers < self.least_workers:
            raise ValueError(
                f"most_workers {self.most_workers} is below least_workers {self.least_workers}: raise it, or set 0"
            )
        if self.low >= self.high:
            raise ValueError(f"low {self.low:g} must be below high {self.high:g}, or workers come and go")
        return self
