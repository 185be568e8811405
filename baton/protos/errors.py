"""The error tree, drawn once: what went wrong -> gRPC status -> HTTP status -> metric label.

Knows nothing of gRPC or HTTP libraries: a status is a name (gRPC) or a number (HTTP).

    BatonError                      INTERNAL             500  internal
    ├── InvalidRequest              INVALID_ARGUMENT     400  invalid_request
    │   ├── ContextTooLong          INVALID_ARGUMENT     400  context_too_long
    │   ├── BodyTooLarge            RESOURCE_EXHAUSTED   413  body_too_large
    │   ├── RequestTooLarge         INVALID_ARGUMENT     413  request_too_large
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
    """The base of all errors. ``message`` is for people, ``param`` names the field at fault (or "").

    ``retry_after_s``: seconds after which to try again, 0 for no advice. ``retryable``: trying again, perhaps
    elsewhere, may help.
    """

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
    """Says that a field of the caller's is wrong; the message says how to correct it."""

    grpc_status, http_status, label = "INVALID_ARGUMENT", 400, "invalid_request"


class ContextTooLong(InvalidRequest):
    """Says that prompt and answer don't fit the model's context."""

    label = "context_too_long"


class BodyTooLarge(InvalidRequest):
    """Says that the request's body is over the limit."""

    grpc_status, http_status, label = "RESOURCE_EXHAUSTED", 413, "body_too_large"


class RequestTooLarge(InvalidRequest):
    """Says that prompt and answers are more than the router may hold at once, however little else it holds."""

    http_status, label = 413, "request_too_large"


class AdapterRefused(InvalidRequest):
    """Says that an adapter's files can't be served with this model; the message names the file and the tensor or
    field.
    """

    label = "adapter_refused"


class Unauthenticated(BatonError):
    """Says that the request has no API key, or an invalid one."""

    grpc_status, http_status, label = "UNAUTHENTICATED", 401, "unauthenticated"


class Forbidden(BatonError):
    """Says that the API key is valid, but may not do this."""

    grpc_status, http_status, label = "PERMISSION_DENIED", 403, "forbidden"


class ModelNotFound(BatonError):
    """Says that no worker serves the named model."""

    grpc_status, http_status, label = "NOT_FOUND", 404, "model_not_found"


class RequestUnknown(BatonError):
    """Says that no request (or file, batch, pin) of that id is known."""

    grpc_status, http_status, label = "NOT_FOUND", 404, "request_unknown"


class WorkerUnknown(BatonError):
    """Says that no worker has the given name."""

    grpc_status, http_status, label = "NOT_FOUND", 404, "worker_unknown"


class AdapterUnknown(BatonError):
    """Says that no adapter has the given name or id."""

    grpc_status, http_status, label = "NOT_FOUND", 404, "adapter_unknown"


class AdapterTaken(BatonError):
    """Says that an adapter of that name with another content is loaded; unload it, or ask to replace it."""

    grpc_status, http_status, label = "ALREADY_EXISTS", 409, "adapter_taken"


class AdapterChanged(BatonError):
    """Says that the adapter's files don't have the digest that was given."""

    grpc_status, http_status, label = "FAILED_PRECONDITION", 409, "adapter_changed"


class Overloaded(BatonError):
    """Says that there is no room now; try again after ``retry_after_s``."""

    grpc_status, http_status, label, retryable = "RESOURCE_EXHAUSTED", 429, "overloaded", True


class PoolExhausted(Overloaded):
    """Says that a worker's KV page pool can't hold the request now."""

    label = "pool_exhausted"


class AdaptersFull(Overloaded):
    """Says that a worker has no room for another adapter: all that it holds are pinned or in use."""

    label = "adapters_full"


class QuotaExceeded(Overloaded):
    """Says that an API key's own rate is used up; other keys are served."""

    label, retryable = "quota_exceeded", False


class PinsFull(Overloaded):
    """Says that pinned prefixes have reached their limit on a worker or of a tenant; deleting some makes room."""

    label, retryable = "pins_full", False


class StorageFull(BatonError):
    """Says that the cluster's store has no room for files; deleting some, or a larger store, makes room."""

    grpc_status, http_status, label = "RESOURCE_EXHAUSTED", 507, "storage_full"


class Unavailable(BatonError):
    """Says that the service can't take the request now; trying elsewhere or later may help."""

    grpc_status, http_status, label, retryable = "UNAVAILABLE", 503, "unavailable", True


class NoWorker(Unavailable):
    """Says that no worker of a role that the request needs is ready."""

    label = "no_worker"


class WorkerLost(Unavailable):
    """Says that a worker's connection broke while it had the request."""

    label = "worker_lost"


class WeightsGone(Unavailable):
    """Says that the weights of a half-written answer are no longer served; sent again, the request is answered by
    others.
    """

    label = "weights_gone"


class AdapterNotLoaded(Unavailable):
    """Says that the worker doesn't hold the request's adapter: it was evicted or unloaded, and may be loaded
    again.
    """

    label = "adapter_not_loaded"


class Draining(Unavailable):
    """Says that the worker or router finishes its requests and accepts no new ones."""

    label = "draining"


class WorkerStalled(WorkerLost):
    """Says that a worker is still connected, but its engine doesn't answer."""

    label = "worker_stalled"


class RankLost(WorkerLost):
    """Says that one of the processes that share a worker's model has died or hangs; the worker ends as a whole.

    ``rank`` is the number of that process.
    """

    label = "rank_lost"

    def __init__(self, message: str, param: str = "", retry_after_s: float = 0.0, rank: int = 0) -> None:
        super().__init__(message, param, retry_after_s)
        self.rank = rank


class RequestBlamed(BatonError):
    """Says that several workers' engines stalled once they had this request; no other worker gets it."""

    grpc_status, http_status, label = "FAILED_PRECONDITION", 422, "request_blamed"


class DeadlineExceeded(BatonError):
    """Says that the caller's deadline has passed."""

    grpc_status, http_status, label = "DEADLINE_EXCEEDED", 504, "deadline_exceeded"


class Cancelled(BatonError):
    """Says that the caller disconnected or cancelled."""

    grpc_status, http_status, label = "CANCELLED", 499, "cancelled"


class HandoffRefused(BatonError):
    """Says that a KV handoff frame was refused; nothing of it was written."""

    grpc_status, label, retryable = "FAILED_PRECONDITION", "handoff_refused", True


class LeaseUnknown(HandoffRefused):
    """Says that there is no such lease: it was never granted, has ended, or belongs to another incarnation of the
    worker.
    """

    label = "lease_unknown"


class StaleEpoch(HandoffRefused):
    """Says that the frame's epoch is not the one in force."""

    label = "stale_epoch"


class ForeignBlock(HandoffRefused):
    """Says that the block's hash or index doesn't belong to this request."""

    label = "foreign_block"


class CorruptFrame(HandoffRefused):
    """Says that the checksum doesn't match the bytes, or the frame isn't well formed."""

    grpc_status, label = "DATA_LOSS", "corrupt_frame"


class LayoutMismatch(HandoffRefused):
    """Says that sender and receiver lay out KV differently; the message names each difference."""

    label, retryable = "layout_mismatch", False


class AlreadyCommitted(HandoffRefused):
    """Says that the handoff is complete: the request is decoding."""

    label, retryable = "already_committed", False


class StartupError(BatonError):
    """Says that the process can't start; the message names the remedy."""

    grpc_status, label = "FAILED_PRECONDITION", "startup"


class ConfigError(StartupError):
    """Says that a setting is wrong; ``param`` names it."""

    label = "config"


class CheckpointError(StartupError):
    """Says that a model's files are missing, damaged or of an unknown kind."""

    label = "checkpoint"


class ErrorInfo(msgspec.Struct, frozen=True):
    """Holds an error as data, to be sent to another process; ``type`` is the name of its class."""

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
    """Returns ``error`` as data. An exception that is no BatonError becomes a plain BatonError with its text."""
    if isinstance(error, BatonError):
        return ErrorInfo(type(error).__name__, error.message, error.param, error.retry_after_s)
    return ErrorInfo("BatonError", f"{type(error).__name__}: {error}")


def from_info(info: ErrorInfo) -> BatonError:
    """Returns the exception that ``info`` describes; an unknown type becomes a plain BatonError."""
    return BY_NAME.get(info.type, BatonError)(info.message, info.param, info.retry_after_s)
