from baton.protos.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "incarnation", "role", "address", "model_id", "fingerprint", "layout", "max_model_len", "vocab_size", "eos_token_ids", "pages", "state", "max_batch", "device", "protocol", "adapters", "metrics_address", "host_id", "data_addresses", "kv_backing", "version", "widths", "takes_extents", "bridges_windows", "receivers", "role_error", "rank_hosts")
    class DataAddressesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class WidthsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    METRICS_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_ADDRESSES_FIELD_NUMBER: _ClassVar[int]
    KV_BACKING_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WIDTHS_FIELD_NUMBER: _ClassVar[int]
    TAKES_EXTENTS_FIELD_NUMBER: _ClassVar[int]
    BRIDGES_WINDOWS_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    ROLE_ERROR_FIELD_NUMBER: _ClassVar[int]
    RANK_HOSTS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: str
    role: str
    address: str
    model_id: str
    fingerprint: str
    layout: _common_pb2.KvLayout
    max_model_len: int
    vocab_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pages: int
    state: str
    max_batch: int
    device: str
    protocol: str
    adapters: _containers.RepeatedScalarFieldContainer[str]
    metrics_address: str
    host_id: str
    data_addresses: _containers.ScalarMap[str, str]
    kv_backing: str
    version: str
    widths: _containers.ScalarMap[str, int]
    takes_extents: bool
    bridges_windows: bool
    receivers: _containers.RepeatedCompositeFieldContainer[KvReceiver]
    role_error: WireError
    rank_hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., pages: _Optional[int] = ..., state: _Optional[str] = ..., max_batch: _Optional[int] = ..., device: _Optional[str] = ..., protocol: _Optional[str] = ..., adapters: _Optional[_Iterable[str]] = ..., metrics_address: _Optional[str] = ..., host_id: _Optional[str] = ..., data_addresses: _Optional[_Mapping[str, str]] = ..., kv_backing: _Optional[str] = ..., version: _Optional[str] = ..., widths: _Optional[_Mapping[str, int]] = ..., takes_extents: _Optional[bool] = ..., bridges_windows: _Optional[bool] = ..., receivers: _Optional[_Iterable[_Union[KvReceiver, _Mapping]]] = ..., role_error: _Optional[_Union[WireError, _Mapping]] = ..., rank_hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("grace_seconds",)
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    grace_seconds: float
    def __init__(self, grace_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("finished", "cancelled")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_FIELD_NUMBER: _ClassVar[int]
    finished: int
    cancelled: int
    def __init__(self, finished: _Optional[int] = ..., cancelled: _Optional[int] = ...) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("role", "grace_seconds", "turn")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GRACE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    role: str
    grace_seconds: float
    turn: str
    def __init__(self, role: _Optional[str] = ..., grace_seconds: _Optional[float] = ..., turn: _Optional[str] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    def __init__(self, incarnation: _Optional[str] = ...) -> None: ...

class PinPrefixRequest(_message.Message):
    __slots__ = ("pin", "token_ids", "adapter_id", "tenant_salt", "ttl_seconds", "source")
    PIN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    pin: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    adapter_id: str
    tenant_salt: bytes
    ttl_seconds: float
    source: str
    def __init__(self, pin: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., adapter_id: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ..., ttl_seconds: _Optional[float] = ..., source: _Optional[str] = ...) -> None: ...

class PinPrefixResponse(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    def __init__(self, tokens: _Optional[int] = ...) -> None: ...

class UnpinPrefixRequest(_message.Message):
    __slots__ = ("pin",)
    PIN_FIELD_NUMBER: _ClassVar[int]
    pin: str
    def __init__(self, pin: _Optional[str] = ...) -> None: ...

class UnpinPrefixResponse(_message.Message):
    __slots__ = ("found",)
    FOUND_FIELD_NUMBER: _ClassVar[int]
    found: bool
    def __init__(self, found: _Optional[bool] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "digest", "pinned")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    pinned: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., pinned: _Optional[bool] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: str
    def __init__(self, id: _Optional[str] = ...) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters", "max_loaded", "max_bytes", "max_rank")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LOADED_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_RANK_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    max_loaded: int
    max_bytes: int
    max_rank: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ..., max_loaded: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_rank: _Optional[int] = ...) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("id", "path", "rank", "bytes", "targets", "pinned", "running", "leaving")
    ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    id: str
    path: str
    rank: int
    bytes: int
    targets: _containers.RepeatedScalarFieldContainer[str]
    pinned: bool
    running: int
    leaving: bool
    def __init__(self, id: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ..., bytes: _Optional[int] = ..., targets: _Optional[_Iterable[str]] = ..., pinned: _Optional[bool] = ..., running: _Optional[int] = ..., leaving: _Optional[bool] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("unless_computing",)
    UNLESS_COMPUTING_FIELD_NUMBER: _ClassVar[int]
    unless_computing: bool
    def __init__(self, unless_computing: _Optional[bool] = ...) -> None: ...

class PoolSnapshot(_message.Message):
    __slots__ = ("pages", "free", "cached", "leased", "quarantined", "leases", "leases_swept", "running", "waiting", "incarnation", "step_seconds_p50", "steps", "computing")
    PAGES_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASES_SWEPT_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_P50_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMPUTING_FIELD_NUMBER: _ClassVar[int]
    pages: int
    free: int
    cached: int
    leased: int
    quarantined: int
    leases: int
    leases_swept: int
    running: int
    waiting: int
    incarnation: str
    step_seconds_p50: float
    steps: int
    computing: bool
    def __init__(self, pages: _Optional[int] = ..., free: _Optional[int] = ..., cached: _Optional[int] = ..., leased: _Optional[int] = ..., quarantined: _Optional[int] = ..., leases: _Optional[int] = ..., leases_swept: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., incarnation: _Optional[str] = ..., step_seconds_p50: _Optional[float] = ..., steps: _Optional[int] = ..., computing: _Optional[bool] = ...) -> None: ...

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "model_id", "adapter_id", "lease", "epoch", "decode_address", "token_ids", "prompt_tokens", "held_blocks", "received_blocks", "sampling", "choice", "tenant_salt", "priority", "router_id", "traceparent", "fetch_address", "fetch_blocks", "fetch_limit_s", "decode_incarnation", "retained", "retained_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    FETCH_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FETCH_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FETCH_LIMIT_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model_id: str
    adapter_id: str
    lease: bytes
    epoch: int
    decode_address: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    held_blocks: int
    received_blocks: _containers.RepeatedScalarFieldContainer[int]
    sampling: _common_pb2.Sampling
    choice: int
    tenant_salt: bytes
    priority: int
    router_id: str
    traceparent: str
    fetch_address: str
    fetch_blocks: int
    fetch_limit_s: float
    decode_incarnation: str
    retained: bool
    retained_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model_id: _Optional[str] = ..., adapter_id: _Optional[str] = ..., lease: _Optional[bytes] = ..., epoch: _Optional[int] = ..., decode_address: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., held_blocks: _Optional[int] = ..., received_blocks: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., choice: _Optional[int] = ..., tenant_salt: _Optional[bytes] = ..., priority: _Optional[int] = ..., router_id: _Optional[str] = ..., traceparent: _Optional[str] = ..., fetch_address: _Optional[str] = ..., fetch_blocks: _Optional[int] = ..., fetch_limit_s: _Optional[float] = ..., decode_incarnation: _Optional[str] = ..., retained: _Optional[bool] = ..., retained_tokens: _Optional[int] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("first", "cached_tokens", "shipped_blocks", "shipped_bytes", "stations", "prompt_logprobs", "pooled", "fetched_blocks")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SHIPPED_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    FETCHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    first: _common_pb2.TokenRun
    cached_tokens: int
    shipped_blocks: int
    shipped_bytes: int
    stations: _containers.RepeatedCompositeFieldContainer[_common_pb2.Station]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    pooled: bytes
    fetched_blocks: int
    def __init__(self, first: _Optional[_Union[_common_pb2.TokenRun, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., shipped_blocks: _Optional[int] = ..., shipped_bytes: _Optional[int] = ..., stations: _Optional[_Iterable[_Union[_common_pb2.Station, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., pooled: _Optional[bytes] = ..., fetched_blocks: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("model_id", "adapter_id", "tenant_salt", "hashes", "layout")
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    adapter_id: str
    tenant_salt: bytes
    hashes: _containers.RepeatedScalarFieldContainer[bytes]
    layout: _common_pb2.KvLayout
    def __init__(self, model_id: _Optional[str] = ..., adapter_id: _Optional[str] = ..., tenant_salt: _Optional[bytes] = ..., hashes: _Optional[_Iterable[bytes]] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ...) -> None: ...

class FetchedBlock(_message.Message):
    __slots__ = ("hash", "checksum", "data", "shard_rank", "shard_count")
    HASH_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    SHARD_RANK_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    checksum: int
    data: bytes
    shard_rank: int
    shard_count: int
    def __init__(self, hash: _Optional[bytes] = ..., checksum: _Optional[int] = ..., data: _Optional[bytes] = ..., shard_rank: _Optional[int] = ..., shard_count: _Optional[int] = ...) -> None: ...

class SessionUp(_message.Message):
    __slots__ = ("hello", "admit", "rearm", "cancel")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ADMIT_FIELD_NUMBER: _ClassVar[int]
    REARM_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    admit: Admit
    rearm: Rearm
    cancel: Cancel
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., admit: _Optional[_Union[Admit, _Mapping]] = ..., rearm: _Optional[_Union[Rearm, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router_id", "protocol")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol: str
    def __init__(self, router_id: _Optional[str] = ..., protocol: _Optional[str] = ...) -> None: ...

class Admit(_message.Message):
    __slots__ = ("request_id", "model_id", "adapter_id", "token_ids", "prompt_tokens", "sampling", "choice", "tenant_salt", "local", "priority", "ttl_seconds", "traceparent", "prediction", "retained", "retained_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TENANT_SALT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_FIELD_NUMBER: _ClassVar[int]
    RETAINED_FIELD_NUMBER: _ClassVar[int]
    RETAINED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model_id: str
    adapter_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: _common_pb2.Sampling
    choice: int
    tenant_salt: bytes
    local: bool
    priority: int
    ttl_seconds: float
    traceparent: str
    prediction: _containers.RepeatedScalarFieldContainer[int]
    retained: bool
    retained_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., model_id: _Optional[str] = ..., adapter_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.Sampling, _Mapping]] = ..., choice: _Optional[int] = ..., tenant_salt: _Optional[bytes] = ..., local: _Optional[bool] = ..., priority: _Optional[int] = ..., ttl_seconds: _Optional[float] = ..., traceparent: _Optional[str] = ..., prediction: _Optional[_Iterable[int]] = ..., retained: _Optional[bool] = ..., retained_tokens: _Optional[int] = ...) -> None: ...

class Rearm(_message.Message):
    __slots__ = ("request_id", "lease", "epoch")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    lease: bytes
    epoch: int
    def __init__(self, request_id: _Optional[str] = ..., lease: _Optional[bytes] = ..., epoch: _Optional[int] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "reason")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class SessionDown(_message.Message):
    __slots__ = ("welcome", "admitted", "rearmed", "refused", "tokens", "ended")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REARMED_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    admitted: Admitted
    rearmed: Rearmed
    refused: Refused
    tokens: TokenFrame
    ended: Ended
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., admitted: _Optional[_Union[Admitted, _Mapping]] = ..., rearmed: _Optional[_Union[Rearmed, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., tokens: _Optional[_Union[TokenFrame, _Mapping]] = ..., ended: _Optional[_Union[Ended, _Mapping]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("worker",)
    WORKER_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerInfo
    def __init__(self, worker: _Optional[_Union[WorkerInfo, _Mapping]] = ...) -> None: ...

class Admitted(_message.Message):
    __slots__ = ("request_id", "lease", "epoch", "held_blocks", "pages")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    lease: bytes
    epoch: int
    held_blocks: int
    pages: int
    def __init__(self, request_id: _Optional[str] = ..., lease: _Optional[bytes] = ..., epoch: _Optional[int] = ..., held_blocks: _Optional[int] = ..., pages: _Optional[int] = ...) -> None: ...

class Rearmed(_message.Message):
    __slots__ = ("request_id", "epoch", "received_blocks")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RECEIVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    epoch: int
    received_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., epoch: _Optional[int] = ..., received_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class WireError(_message.Message):
    __slots__ = ("type", "message", "param", "retry_after_s")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    type: str
    message: str
    param: str
    retry_after_s: float
    def __init__(self, type: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: WireError
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[_Union[WireError, _Mapping]] = ...) -> None: ...

class Ended(_message.Message):
    __slots__ = ("request_id", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    error: WireError
    def __init__(self, request_id: _Optional[str] = ..., error: _Optional[_Union[WireError, _Mapping]] = ...) -> None: ...

class RequestTokens(_message.Message):
    __slots__ = ("request_id", "run", "cached_tokens", "stations", "prompt_logprobs", "pooled")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STATIONS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    POOLED_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run: _common_pb2.TokenRun
    cached_tokens: int
    stations: _containers.RepeatedCompositeFieldContainer[_common_pb2.Station]
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    pooled: bytes
    def __init__(self, request_id: _Optional[str] = ..., run: _Optional[_Union[_common_pb2.TokenRun, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., stations: _Optional[_Iterable[_Union[_common_pb2.Station, _Mapping]]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., pooled: _Optional[bytes] = ...) -> None: ...

class TokenFrame(_message.Message):
    __slots__ = ("step", "outputs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[RequestTokens]
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[RequestTokens, _Mapping]]] = ...) -> None: ...

class HandoffOpen(_message.Message):
    __slots__ = ("request_id", "layout", "sender", "total_blocks", "tail_tokens", "model_id", "fingerprint", "adapter_id", "extents", "receivers")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TAIL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    layout: _common_pb2.KvLayout
    sender: str
    total_blocks: int
    tail_tokens: int
    model_id: str
    fingerprint: str
    adapter_id: str
    extents: _containers.RepeatedCompositeFieldContainer[Extent]
    receivers: int
    def __init__(self, request_id: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KvLayout, _Mapping]] = ..., sender: _Optional[str] = ..., total_blocks: _Optional[int] = ..., tail_tokens: _Optional[int] = ..., model_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., adapter_id: _Optional[str] = ..., extents: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ..., receivers: _Optional[int] = ...) -> None: ...

class KvReceiver(_message.Message):
    __slots__ = ("address", "part")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    address: str
    part: _containers.RepeatedCompositeFieldContainer[Extent]
    def __init__(self, address: _Optional[str] = ..., part: _Optional[_Iterable[_Union[Extent, _Mapping]]] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("at", "bytes", "stride", "count")
    AT_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    at: int
    bytes: int
    stride: int
    count: int
    def __init__(self, at: _Optional[int] = ..., bytes: _Optional[int] = ..., stride: _Optional[int] = ..., count: _Optional[int] = ...) -> None: ...

class HandoffCommit(_message.Message):
    __slots__ = ("first", "cached_tokens")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first: _common_pb2.TokenRun
    cached_tokens: int
    def __init__(self, first: _Optional[_Union[_common_pb2.TokenRun, _Mapping]] = ..., cached_tokens: _Optional[int] = ...) -> None: ...
