"""Attempts at one line of a batch job: what may pass is tried again.

Knows nothing of jobs, stores or places.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import orjson

from baton.protos.errors import BatonError, Overloaded, QuotaExceeded
from baton.router.answer.service import GenerationService
from baton.router.api.batch.lines import BatchLine, answer_line

TRIES = 6  # attempts at a line whose error may pass
FIRST_PAUSE_S = 1.0  # seconds between the first two of them at least; it doubles: workers come back within 20 s
MOST_PAUSE_S = 10.0  # seconds between two attempts, at most
LEAST_PAUSE_S = 0.05  # seconds before a used-up rate is tried again, at least
log = logging.getLogger(__name__)


async def answered(
    service: GenerationService, line: BatchLine, request_id: str, pause: Callable[[float], Awaitable[bool]]
) -> tuple[bytes, bool]:
    """Returns the answer to a line, as JSON, and whether its status is 200.

    A rate that is used up is waited for, and so is room; what else may pass is tried some times. ``pause`` waits so
    many seconds, and returns whether to try no more.
    """
    failed: BatonError = BatonError("it was not tried")
    attempt = 0
    while attempt < TRIES:
        try:
            answer, good = await answer_line(service, line, request_id)
            return orjson.dumps(answer), good
        except QuotaExceeded as error:
            failed, seconds = error, max(error.retry_after_s, LEAST_PAUSE_S)
        except BatonError as error:
            failed, seconds = error, max(error.retry_after_s, FIRST_PAUSE_S * 2.0**attempt)
            attempt += type(error) is not Overloaded  # the queue's: nobody computed anything for the line
        except Exception as error:  # a line that we stumble over fails alone
            log.exception("batch line %s failed in the router", line.custom_id)
            failed = BatonError(f"the router failed on this line: {error}")
            break
        if attempt == TRIES or await pause(min(MOST_PAUSE_S, seconds)):
            break
    return orjson.dumps(_gave_up(line, request_id, failed)), False


def _gave_up(line: BatchLine, request_id: str, error: BatonError) -> dict[str, object]:
    told = {"code": error.label, "message": error.message}
    return {"id": f"batch_req_{request_id}", "custom_id": line.custom_id, "response": None, "error": told}
