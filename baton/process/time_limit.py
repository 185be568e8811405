"""A limit on one stretch of this process's life: what hangs for longer is ended, its stacks in the log.

Knows nothing of what hangs. A thread of C keeps the time, so that neither a blocked event loop, nor the GIL, nor a
library's finalizer can hold it up; one limit is in force at a time.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn


def end_within(seconds: float) -> None:
    """Write every thread's stack to stderr then and exit 1, unless another limit takes this one's place."""
    faulthandler.dump_traceback_later(seconds, exit=True)


async def end_unless_turning(seconds: float) -> None:
    """Ends the process if its event loop stands still for ``seconds``, for as long as this task runs."""
    while True:
        end_within(seconds)
        await asyncio.sleep(seconds / 10)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and exit with its status, without finalizers: no thread keeps the process (and its slot)."""
    try:
        status = main()
    except SystemExit:
        raise  # argparse's; nothing runs yet
    except BaseException:
        traceback.print_exc()
        status = 1
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
