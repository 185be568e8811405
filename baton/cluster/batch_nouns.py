"""Files, batch jobs and the right to work on one. Knows nothing of where they are kept or who may see them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec


class StoredFile(msgspec.Struct, frozen=True):
    """Describes a stored file beside its bytes. ``created`` in seconds of the wall clock."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created: int


class BatchJob(msgspec.Struct, frozen=True):
    """Describes one batch job.

    Times in seconds of the wall clock, 0: not yet. ``key`` is the caller's key as JSON, or empty.
    """

    id: str
    tenant: str
    endpoint: str
    input_file: str
    window: str
    total: int
    created: int
    key: str = ""
    metadata: dict[str, str] = {}
    status: str = "validating"
    completed: int = 0
    failed: int = 0
    started: int = 0
    ended: int = 0
    cancelled: int = 0
    output_file: str = ""
    error_file: str = ""
    errors: tuple[dict[str, Any], ...] = ()


class JobClaim(NamedTuple):
    """One router's right to work on a job: ``number`` rises with every claim that is given."""

    job_id: str
    owner: str
    number: int


class JobClaimLost(Exception):
    """Another router has the job, or it is closed: nothing was written."""


class ListPage(msgspec.Struct, frozen=True):
    """A page of a list: of one tenant's, or of all for None; ``limit`` that follow ``after``, an id."""

    tenant: str | None = None
    after: str = ""
    limit: int = 20
