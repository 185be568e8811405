"""OpenAI's Files and Batch endpoints over REST: upload a file of requests, get a file of answers.

Knows nothing of how a request is answered (``batch.lane``). A tenant sees its own files and jobs only.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec
from fastapi import APIRouter, Request
from pydantic import Field, StringConstraints
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from baton.cluster.batch_nouns import BatchJob, ListPage, StoredFile
from baton.cluster.batch_store import BatchStore
from baton.protos.errors import BodyTooLarge, Cancelled, InvalidRequest, QuotaExceeded, RequestUnknown, Unavailable
from baton.protos.json import Json
from baton.router.access.caller import CALLER
from baton.router.access.keys import noted
from baton.router.api.batch.lines import by_model, read_lines
from baton.router.api.body import body_docs
from baton.router.api.errors import json_response
from baton.router.api.large import INLINE_BYTES, offload_if, parsed
from baton.router.api.limits import read_body
from baton.router.api.request_body import RequestBody, ignored_header, refuse
from baton.router.api.surfaces import BatchSurface

DAY_S = 86_400  # seconds: the completion window that OpenAI's API knows
LISTED, MOST_LISTED = 20, 100  # in one page
FILE_DOCS: Json = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"purpose": {"const": "batch"}, "file": {"type": "string", "format": "binary"}},
                    "required": ["purpose", "file"],
                }
            }
        },
    }
}


# As in OpenAI's API.
MetadataKey = Annotated[str, StringConstraints(max_length=64)]
MetadataValue = Annotated[str, StringConstraints(max_length=512)]


class BatchBody(RequestBody):
    """Describes the body of POST /v1/batches."""

    surface: ClassVar[str] = "batches"

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: dict[MetadataKey, MetadataValue] | None = Field(default=None, max_length=16)


def batch_routes(surface: BatchSurface) -> APIRouter:
    """Returns the routes of ``/v1/files`` and ``/v1/batches``."""
    routes = APIRouter()

    @routes.post("/v1/files", openapi_extra=FILE_DOCS)
    async def add_file(request: Request) -> Response:
        return json_response(_file_json(await _add_file(surface, request)))

    @routes.get("/v1/files", openapi_extra=_listing("order", "purpose"))
    async def files(request: Request) -> Response:
        found, more = await _store(surface).files(_asked_of_files(request))
        return json_response(_list([_file_json(file) for file in found], more))

    @routes.get("/v1/files/{file_id}")
    async def file(file_id: str) -> Response:
        return json_response(_file_json(await _file(surface, file_id)))

    @routes.delete("/v1/files/{file_id}")
    async def drop_file(file_id: str) -> Response:
        await _store(surface).drop_file(await _file(surface, file_id))
        return json_response({"id": file_id, "object": "file", "deleted": True})

    @routes.get("/v1/files/{file_id}/content")
    async def content(file_id: str) -> Response:
        found = await _file(surface, file_id)
        return Response(await _store(surface).content(found.id), media_type="application/octet-stream")

    @routes.post("/v1/batches", openapi_extra=body_docs(BatchBody))
    async def add_batch(request: Request) -> Response:
        body = await parsed(BatchBody, await read_body(request, surface.max_body_bytes))
        return json_response(_job_json(await _add_job(surface, body)), headers=ignored_header(body))

    @routes.get("/v1/batches", openapi_extra=_listing())
    async def batches(request: Request) -> Response:
        found, more = await _store(surface).jobs(_asked(request))
        return json_response(_list([_job_json(job) for job in found], more))

    @routes.get("/v1/batches/{job_id}")
    async def batch(job_id: str) -> Response:
        return json_response(_job_json(await _job(surface, job_id)))

    @routes.post("/v1/batches/{job_id}/cancel")
    async def cancel(job_id: str) -> Response:
        job = await _job(surface, job_id)
        if not job.ended:
            await _store(surface).request_cancel(job.id, int(surface.environment.wall_clock()))
            job = await _job(surface, job_id)
        return json_response(_job_json(job))

    return routes


def _store(surface: BatchSurface) -> BatchStore:
    if surface.store is None:
        raise Unavailable("batches need the cluster's Redis, which this router was started without")
    return surface.store


async def _add_file(surface: BatchSurface, request: Request) -> StoredFile:
    limit = surface.max_body_bytes
    if int(request.headers.get("content-length") or limit + 1) > limit:
        raise BodyTooLarge(f"give a content-length of {limit} bytes at most, or raise router.max_body_bytes")
    try:
        async with request.form(max_files=1, max_fields=4) as form:
            for field, value in form.multi_items():  # OpenAI's client writes expires_after[seconds]
                refuse("files", field.partition("[")[0], value)
            content, name = await _uploaded(form.get("file"), form.get("purpose"))
    except HTTPException as error:
        raise InvalidRequest(f"the body should be multipart/form-data: {error.detail}", "file") from None
    except ClientDisconnect:
        raise Cancelled("the client went away while it sent its file") from None
    now = int(surface.environment.wall_clock())
    file = StoredFile(
        f"file-{surface.environment.new_id()}", CALLER.get().tenant, name[:256], "batch", len(content), now
    )
    most = surface.max_stored_bytes
    kept = await _store(surface).add_file(file, content, most)
    if kept is not None:
        raise QuotaExceeded(
            f"{kept} bytes of files are kept, and {file.bytes} more would be over {most}: delete some, or raise "
            "router.max_stored_bytes",
            "file",
        )
    return file


async def _uploaded(upload: object, purpose: object) -> tuple[bytes, str]:
    if purpose != "batch":
        raise InvalidRequest(f"purpose is {purpose!r}: only 'batch' is served", "purpose")
    if not isinstance(upload, UploadFile):
        raise InvalidRequest("file is missing: give it as multipart/form-data", "file")
    return await upload.read(), upload.filename or "file"


async def _add_job(surface: BatchSurface, body: BatchBody) -> BatchJob:
    file, caller, now = (
        await _file(surface, body.input_file_id),
        CALLER.get(),
        int(surface.environment.wall_clock()),
    )
    content = await _store(surface).content(file.id)
    lines, errors = await offload_if(len(content) > INLINE_BYTES, read_lines, content, body.endpoint)
    key = msgspec.json.encode(noted(caller.key)).decode() if caller.key else ""
    job = BatchJob(
        id=f"batch_{surface.environment.new_id()}",
        tenant=caller.tenant,
        endpoint=body.endpoint,
        input_file=file.id,
        window=body.completion_window,
        total=len(lines),
        created=now,
        key=key,
        metadata=body.metadata or {},
        status="failed" if errors else "validating",
        ended=now if errors else 0,
        errors=tuple(errors),
        models=() if errors else tuple(sorted(await by_model(lines, surface.model_of))),
    )
    await _store(surface).put(job, is_open=not errors)
    return job


async def _file(surface: BatchSurface, file_id: str) -> StoredFile:
    found = await _store(surface).file(file_id)
    if found is None or not CALLER.get().may_see(found.tenant):
        raise RequestUnknown(f"there is no file {file_id!r}", "file_id")
    return found


async def _job(surface: BatchSurface, job_id: str) -> BatchJob:
    found = await _store(surface).job(job_id)
    if found is None or not CALLER.get().may_see(found.tenant):
        raise RequestUnknown(f"there is no batch {job_id!r}", "batch_id")
    return found


def _asked(request: Request) -> ListPage:
    """The caller's own, or everybody's for who may see them."""
    said, caller = request.query_params.get("limit", str(LISTED)), CALLER.get()
    if not (said.isdecimal() and len(said) < 9 and 1 <= int(said) <= MOST_LISTED):
        raise InvalidRequest(f"limit is {said!r}: give 1 to {MOST_LISTED}", "limit")
    tenant = None if caller.sees_all else caller.tenant
    return ListPage(tenant, request.query_params.get("after", ""), int(said))


def _asked_of_files(request: Request) -> ListPage:
    """Returns what is asked for, with ``order`` and ``purpose``, which lists of batches haven't."""
    told = request.query_params
    if (order := told.get("order", "desc")) not in ("asc", "desc"):
        raise InvalidRequest(f"order is {order!r}: give asc or desc", "order")
    page = _asked(request)
    return msgspec.structs.replace(page, oldest_first=order == "asc", purpose=told.get("purpose", ""))


def _list(page: list[Json], more: bool) -> Json:
    first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": more}


def _listing(*more: str) -> Json:
    limit = {"type": "integer", "minimum": 1, "maximum": MOST_LISTED, "default": LISTED}
    return {
        "parameters": [
            {"name": "limit", "in": "query", "schema": limit},
            *({"name": name, "in": "query", "schema": {"type": "string"}} for name in ("after", *more)),
        ]
    }


def _file_json(file: StoredFile) -> Json:
    return {
        "id": file.id,
        "object": "file",
        "bytes": file.bytes,
        "created_at": file.created,
        "filename": file.filename,
        "purpose": file.purpose,
        "status": "processed",
    }


def _job_json(job: BatchJob) -> Json:
    at = {"completed": "completed_at", "failed": "failed_at", "cancelled": "cancelled_at"}
    times = {name: job.ended if job.status == status else None for status, name in at.items()}
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "errors": {"object": "list", "data": list(job.errors)} if job.errors else None,
        "input_file_id": job.input_file,
        "completion_window": job.window,
        "status": job.status,
        "output_file_id": job.output_file or None,
        "error_file_id": job.error_file or None,
        "created_at": job.created,
        "in_progress_at": job.started or None,
        "cancelling_at": job.cancelling or None,
        "expires_at": job.created + DAY_S,
        "request_counts": {"total": job.total, "completed": job.completed, "failed": job.failed},
        "metadata": job.metadata or None,
        **times,
    }
