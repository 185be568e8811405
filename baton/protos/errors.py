"""The error tree, drawn once: what went wrong -> gRPC status -> HTTP status -> metric label.

Knows nothing of gRPC or HTTP libraries: a status is a name (gRPC) or a number (HTTP).

    BatonError                      INTERNAL             500  internal
    ├── InvalidRequest              INVALID_ARGUMENT     400  invalid_request
    │   ├── ContextTooLong          INVALID_ARGUMENT     400  context_too_long
    │   ├── BodyTooLarge            RESOURCE_EXHAUSTED   413  body_too_large
    │   └── AdapterRefused          INVALID_ARGUMENT     400  adapter_refused
    ├── Unauthenticated             UNAUTHENTICATED      401  unauthenticated
    ├── Forbidden                   PERMISSION_DENIED    403  forbidden
    ├── ModelNotFound               NOT_FOUND            404  model_not_found
    ├── RequestUnknown              NOT_FOUND            404  request_unknown
    ├── WorkerUnknown               NOT_FOUND            404  worker_unknown
    ├── AdapterUnknown              NOT_FOUND            404  adapter_unknown
    ├── AdapterTaken                ALREADY_EXISTS       409  adapter_taken
    ├── AdapterChanged              FAILED_PRECONDITION  409  adapter_changed
    ├── Overloaded                  RESOURCE_EXHAUSTED   429  overloaded
    │   ├── PoolExhausted           RESOURCE_EXHAUSTED   429  pool_exhausted
    │   ├── AdaptersFull            RESOURCE_EXHAUSTED   429  adapters_full
    │   ├── PinsFull                RESOURCE_EXHAUSTED   429  pins_full
    │   └── QuotaExceeded           RESOURCE_EXHAUSTED   429  quota_exceeded
    ├── StorageFull                 RESOURCE_EXHAUSTED   507  storage_full
    ├── Unavailable                 UNAVAILABLE          503  unavailable
    │   ├── NoWorker                UNAVAILABLE          503  no_worker
    │   ├── WorkerLost              UNAVAILABLE          503  worker_lost
    │   │   ├── WorkerStalled       UNAVAILABLE          503  worker_stalled
    │   │   └── RankLost            UNAVAILABLE          503  rank_lost
    │   ├── WeightsGone             UNAVAILABLE          503  weights_gone
    │   ├── AdapterNotLoaded        UNAVAILABLE          503  adapter_not_loaded
    │   └── Draining                UNAVAILABLE          503  draining
    ├── RequestBlamed               FAILED_PRECONDITION  422  request_blamed
    ├── DeadlineExceeded            DEADLINE_EXCEEDED    504  deadline_exceeded
    ├── Cancelled                   CANCELLED            499  cancelled
    ├── HandoffRefused              FAILED_PRECONDITION  500  handoff_refused
    │   ├── LeaseUnknown            FAILED_PRECONDITION  500  lease_unknown
    │   ├── StaleEpoch              FAILED_PRECONDITION  500  stale_epoch
    │   ├── ForeignBlock            FAILED_PRECONDITION  500  foreign_block
    │   ├── CorruptFrame            DATA_LOSS            500  corrupt_frame
    │   ├── LayoutMismatch          FAILED_PRECONDITION  500  layout_mismatch
    │   └── AlreadyCommitted        FAILED_PRECONDITION  500  already_committed
    └── StartupError                FAILED_PRECONDITION  500  startup
        ├── ConfigError             FAILED_PRECONDITION  500  config
        └── CheckpointError         FAILED_PRECONDITION  500  checkpoint
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class BatonError(Exception):
    """Is the root of the tree. ``message`` is for people, ``param`` names the field at fault (or "")."""

    grpc_status: ClassVar[str] = "INTERNAL"
    http_status: ClassVar[int] = 500
    label: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, param: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s


class InvalidRequest(BatonError):
    """The caller's field is wrong; the message says how to mend it."""

    grpc_status, http_status, label = "INVALID_ARGUMENT", 400, "invalid_request"


class ContextTooLong(InvalidRequest):
    """Prompt and answer don't fit the model's context."""

    label = "context_too_long"


class BodyTooLarge(InvalidRequest):
    """The request's body is over the limit."""

    grpc_status, http_status, label = "RESOURCE_EXHAUSTED", 413, "body_too_large"


class AdapterRefused(InvalidRequest):
    """The adapter's files can't be served with this model; the message names the file and the tensor or field."""

    label = "adapter_refused"


class Unauthenticated(BatonError):
    """The request has no API key, or one that opens nothing."""

    grpc_status, http_status, label = "UNAUTHENTICATED", 401, "unauthenticated"


class Forbidden(BatonError):
    """The key is good, but not for this."""

    grpc_status, http_status, label = "PERMISSION_DENIED", 403, "forbidden"


class ModelNotFound(BatonError):
    """No worker serves the model that was named."""

    grpc_status, http_status, label = "NOT_FOUND", 404, "model_not_found"


class RequestUnknown(BatonError):
    """The message is about a request that nobody here knows."""

    grpc_status, http_status, label = "NOT_FOUND", 404, "request_unknown"


class WorkerUnknown(BatonError):
    """No worker has the name that was given."""

    grpc_status, http_status, label = "NOT_FOUND", 404, "worker_unknown"


class AdapterUnknown(BatonError):
    """No adapter has the name or id that was given."""

    grpc_status, http_status, label = "NOT_FOUND", 404, "adapter_unknown"


class AdapterTaken(BatonError):
    """An adapter of that name with another content is loaded; unload it, or say that it is replaced."""

    grpc_status, http_status, label = "ALREADY_EXISTS", 409, "adapter_taken"


class AdapterChanged(BatonError):
    """The adapter's files are not those whose digest was given."""

    grpc_status, http_status, label = "FAILED_PRECONDITION", 409, "adapter_changed"


class Overloaded(BatonError):
    """There is no room now; try again after ``retry_after_s``."""

    grpc_status, http_status, label, retryable = "RESOURCE_EXHAUSTED", 429, "overloaded", True


class PoolExhausted(Overloaded):
    """A worker's page pool can't hold the request now."""

    label = "pool_exhausted"


class AdaptersFull(Overloaded):
    """A worker has no room for another adapter: all that it holds are pinned or in use."""

    label = "adapters_full"


class QuotaExceeded(Overloaded):
    """A key's own rate is used up; others are served."""

    label, retryable = "quota_exceeded", False


class PinsFull(Overloaded):
    """Pinned prefixes take as much of a worker, or of a tenant's share, as they may; deleting some makes room."""

    label, retryable = "pins_full", False


class StorageFull(BatonError):
    """The cluster's store has no room for files; deleting some, or a larger store, makes room."""

    grpc_status, http_status, label = "RESOURCE_EXHAUSTED", 507, "storage_full"


class Unavailable(BatonError):
    """The service can't take the request; trying elsewhere or later may help."""

    grpc_status, http_status, label, retryable = "UNAVAILABLE", 503, "unavailable", True


class NoWorker(Unavailable):
    """There is no ready worker of a role that the request needs."""

    label = "no_worker"


class WorkerLost(Unavailable):
    """A worker's connection broke while the worker had the request."""

    label = "worker_lost"


class WeightsGone(Unavailable):
    """A half-written answer's weights are no longer served; sent again, the request is answered by others."""

    label = "weights_gone"


class AdapterNotLoaded(Unavailable):
    """The worker doesn't hold the request's adapter: it was evicted or unloaded, and may be loaded again."""

    label = "adapter_not_loaded"


class Draining(Unavailable):
    """The worker or router finishes what it has and takes nothing new."""

    label = "draining"


class WorkerStalled(WorkerLost):
    """A worker has its connections still, and its engine gives no answer."""

    label = "worker_stalled"


class RankLost(WorkerLost):
    """One of the processes that share a worker's model is gone or stuck: the worker ends as a whole."""

    label = "rank_lost"

    def __init__(self, message: str, param: str = "", retry_after_s: float = 0.0, rank: int = 0) -> None:
        super().__init__(message, param, retry_after_s)
        self.rank = rank


class RequestBlamed(BatonError):
    """Several workers' engines stopped answering once they had the request: it is given to no other."""

    grpc_status, http_status, label = "FAILED_PRECONDITION", 422, "request_blamed"


class DeadlineExceeded(BatonError):
    """The caller's deadline passed."""

    grpc_status, http_status, label = "DEADLINE_EXCEEDED", 504, "deadline_exceeded"


class Cancelled(BatonError):
    """The caller went away or asked to stop."""

    grpc_status, http_status, label = "CANCELLED", 499, "cancelled"


class HandoffRefused(BatonError):
    """A handoff frame was not accepted; nothing was written for it."""

    grpc_status, label, retryable = "FAILED_PRECONDITION", "handoff_refused", True


class LeaseUnknown(HandoffRefused):
    """There is no such lease: it was never given, has ended, or is of another incarnation."""

    label = "lease_unknown"


class StaleEpoch(HandoffRefused):
    """The frame's epoch is not the one in force."""

    label = "stale_epoch"


class ForeignBlock(HandoffRefused):
    """The block's hash or index is not of this request."""

    label = "foreign_block"


class CorruptFrame(HandoffRefused):
    """The checksum doesn't match the bytes, or the frame isn't well formed."""

    grpc_status, label = "DATA_LOSS", "corrupt_frame"


class LayoutMismatch(HandoffRefused):
    """Sender and receiver lay out KV differently; the message names each difference."""

    label, retryable = "layout_mismatch", False


class AlreadyCommitted(HandoffRefused):
    """The handoff is complete: the request is decoding."""

    label, retryable = "already_committed", False


class StartupError(BatonError):
    """The process can't start; the message names the remedy."""

    grpc_status, label = "FAILED_PRECONDITION", "startup"


class ConfigError(StartupError):
    """A setting is wrong."""

    label = "config"


class CheckpointError(StartupError):
    """A model's files are missing, damaged or of an unknown kind."""

    label = "checkpoint"


class ErrorInfo(msgspec.Struct, frozen=True):
    """An error as data, which can cross a process line."""

    type: str
    message: str
    param: str = ""
    retry_after_s: float = 0.0


def _tree(cls: type[BatonError]) -> dict[str, type[BatonError]]:
    found = {cls.__name__: cls}
    for child in cls.__subclasses__():
        found |= _tree(child)
    return found


BY_NAME: dict[str, type[BatonError]] = _tree(BatonError)


def to_info(error: BaseException) -> ErrorInfo:
    """Returns ``error`` as data. What isn't ours becomes the root of the tree, its text kept."""
    if isinstance(error, BatonError):
        return ErrorInfo(type(error).__name__, error.message, error.param, error.retry_after_s)
    return ErrorInfo("BatonError", f"{type(error).__name__}: {error}")


def from_info(info: ErrorInfo) -> BatonError:
    """Returns the exception that ``info`` stands for; an unknown type becomes the root."""
    return BY_NAME.get(info.type, BatonError)(info.message, info.param, info.retry_after_s)
