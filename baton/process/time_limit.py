"""A time limit on a stretch of this process's life: if it hangs, its stacks are logged and it ends.

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
    """After ``seconds``, writes every thread's stack to stderr and exits with 1, unless a later call replaces this
    limit.
    """
    faulthandler.dump_traceback_later(seconds, exit=True)


async def end_if_loop_stalls(seconds: float) -> None:
    """Ends the process if its event loop stands still for ``seconds``, while this task runs."""
    while True:
        end_within(seconds)
        await asyncio.sleep(seconds / 10)


def end_with(main: Callable[[], int]) -> NoReturn:
    """Runs ``main`` and exits with the status it returns, 1 if it raises.

    Finalizers are skipped, so that no thread keeps the process (and its slot).
    """
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
