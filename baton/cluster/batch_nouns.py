"""Types of the batch API: stored files, batch jobs, and the claim on a job.

Knows nothing of where they are kept or who may see them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from baton.protos.json import Json


class StoredFile(msgspec.Struct, frozen=True):
    """Describes a stored file, without its content; ``bytes`` is its size, ``created`` Unix seconds."""

    id: str
    tenant: str
    filename: str
    purpose: str
    bytes: int
    created: int


class BatchJob(msgspec.Struct, frozen=True):
    """Describes one batch job.

    Times are Unix seconds, 0: not yet. ``total``, ``completed`` and ``failed`` count lines. ``key`` is the caller's
    API key entry as JSON, or "". ``status`` is OpenAI's. ``models`` are the base models that its lines are for, ""
    for names that weren't known; empty where that isn't known of any line.
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
    cancelling: int = 0  # when somebody asked to cancel it
    output_file: str = ""
    error_file: str = ""
    errors: tuple[Json, ...] = ()
    models: tuple[str, ...] = ()


class JobClaim(NamedTuple):
    """Holds one router's exclusive right to work on a job; ``number`` rises with every claim on the job."""

    job_id: str
    owner: str
    number: int


class JobClaimLost(Exception):
    """Says that another router has claimed the job, or that it is closed: nothing was written."""


class ListPage(msgspec.Struct, frozen=True):
    """Selects a page of a list: ``limit`` entries after the id ``after``, of one tenant, or of all for None.

    The newest come first unless ``oldest_first``. Of files, a ``purpose`` leaves out those of others.
    """

    tenant: str | None = None
    after: str = ""
    limit: int = 20
    oldest_first: bool = False
    purpose: str = ""
