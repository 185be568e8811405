"""How one role's loop follows another's around the same engine, or the former role's does if the other can't begin.

Knows nothing of what a role needs.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.engine.steps.loop import StepLoop
from baton.protos.channel import RoleIs
from baton.protos.errors import RankLost, to_info


def succession(loop: StepLoop, make: Callable[[str], StepLoop]) -> StepLoop:
    """Returns the loop of the role that ``loop`` was told to change to, with the same runner, pages and cached
    blocks; one of its present role if the other can't begin. ``make`` makes the loop of a role. Raises RankLost.
    """
    stays = None
    try:
        after = make(loop.next_role)
    except RankLost:
        raise
    except Exception as error:  # as of a draft model that can't be loaded here: it was not asked for until now
        after, stays = make(loop.role), RoleIs(loop.role, to_info(error))
    after.succeed(loop, stays)
    return after
