"""Conversion of each struct of ``nouns`` to its protobuf message and back.

Knows nothing of channels or servers. Messages that belong to one service alone (a session's, a prefill's) are built
and read beside it. Whether a peer's protocol may be read at all is for the caller to check (version.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.protos import nouns
from baton.protos.errors import ErrorInfo
from baton.protos.json import Json
from baton.protos.v1 import common_pb2 as c
from baton.protos.v1 import worker_pb2 as w

_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "max_tokens",
    "min_tokens",
    "ignore_eos",
)


def sampling_to_pb(s: nouns.Sampling) -> c.Sampling:
    """Returns the sampling parameters as protobuf, with every field set, so that a reader needs no defaults of its
    own.
    """
    out = c.Sampling(
        logit_bias=s.logit_bias,
        stop_token_ids=s.stop_token_ids,
        allowed_token_ids=s.allowed_token_ids,
        logprob_token_ids=s.logprob_token_ids,
        bad_words=[c.TokenSequence(ids=ids) for ids in s.bad_words],
        **{name: getattr(s, name) for name in _SCALARS},
    )
    if s.logprobs is not None:
        out.logprobs = s.logprobs
    if s.prompt_logprobs is not None:
        out.prompt_logprobs = s.prompt_logprobs
    if s.max_drafts is not None:
        out.max_drafts = s.max_drafts
    if s.pooling:
        out.pooling = s.pooling
    if s.grammar is not None:
        out.grammar.kind, out.grammar.spec = s.grammar.kind, s.grammar.spec
    return out


def sampling_fields(pb: c.Sampling) -> Json:
    """Returns only the sampling fields that are set in ``pb``, by name: what a client said, without defaults."""
    scalars = (*_SCALARS, "logprobs", "prompt_logprobs", "pooling", "max_drafts")
    fields: Json = {n: getattr(pb, n) for n in scalars if pb.HasField(n)}
    if pb.logit_bias:
        fields["logit_bias"] = dict(pb.logit_bias)
    if pb.stop_token_ids:
        fields["stop_token_ids"] = tuple(pb.stop_token_ids)
    if pb.allowed_token_ids:
        fields["allowed_token_ids"] = tuple(pb.allowed_token_ids)
    if pb.logprob_token_ids:
        fields["logprob_token_ids"] = tuple(pb.logprob_token_ids)
    if pb.bad_words:
        fields["bad_words"] = tuple(tuple(word.ids) for word in pb.bad_words)
    if pb.HasField("grammar"):
        fields["grammar"] = nouns.Grammar(pb.grammar.kind, pb.grammar.spec)
    return fields


def sampling_from_pb(pb: c.Sampling) -> nouns.Sampling:
    """Returns sampling parameters from protobuf; fields that are not set get ``Sampling``'s defaults."""
    return nouns.Sampling(**sampling_fields(pb))


def _logprob_to_pb(t: nouns.TokenLogprob) -> c.TokenLogprob:
    return c.TokenLogprob(token_id=t.token_id, logprob=t.logprob, rank=t.rank)


def _logprob_from_pb(t: c.TokenLogprob) -> nouns.TokenLogprob:
    return nouns.TokenLogprob(t.token_id, t.logprob, t.rank)


def logprobs_to_pb(t: nouns.TokenLogprobs) -> c.TokenLogprobs:
    """Returns a token's logprob and its alternatives' as protobuf."""
    return c.TokenLogprobs(chosen=_logprob_to_pb(t.chosen), top=[_logprob_to_pb(x) for x in t.top])


def logprobs_from_pb(t: c.TokenLogprobs) -> nouns.TokenLogprobs:
    """Returns a token's logprob and its alternatives' from protobuf."""
    return nouns.TokenLogprobs(_logprob_from_pb(t.chosen), tuple(_logprob_from_pb(x) for x in t.top))


def run_to_pb(run: nouns.TokenRun) -> c.TokenRun:
    """Returns a run of tokens as protobuf."""
    out = c.TokenRun()
    write_run(out, run)
    return out


def write_run(out: c.TokenRun, run: nouns.TokenRun) -> None:
    """Writes a run of tokens into ``out``, an empty message; what most runs lack costs nothing where it is absent.

    A message that is passed to another one's constructor is serialized and parsed for the copy.
    """
    out.output_index = run.output_index
    out.token_ids.extend(run.token_ids)
    if run.logprobs:
        out.logprobs.extend(map(logprobs_to_pb, run.logprobs))
    if run.finish_reason:
        out.finish_reason = run.finish_reason
    if run.stop_token_id is not None:
        out.stop_token_id = run.stop_token_id
    if run.accepted_drafts or run.rejected_drafts:
        out.accepted_drafts, out.rejected_drafts = run.accepted_drafts, run.rejected_drafts


def run_from_pb(pb: c.TokenRun) -> nouns.TokenRun:
    """Returns a run of tokens from protobuf."""
    return nouns.TokenRun(
        output_index=pb.output_index,
        token_ids=tuple(pb.token_ids),
        logprobs=tuple([logprobs_from_pb(x) for x in pb.logprobs]) if pb.logprobs else (),
        finish_reason=pb.finish_reason,
        stop_token_id=pb.stop_token_id if pb.HasField("stop_token_id") else None,
        accepted_drafts=pb.accepted_drafts,
        rejected_drafts=pb.rejected_drafts,
    )


def stations_to_pb(stations: tuple[nouns.Station, ...]) -> list[c.Station]:
    """Returns the seconds at each station of a request's way as protobuf."""
    return [c.Station(name=s.name, seconds=s.seconds) for s in stations]


def stations_from_pb(pb: Iterable[c.Station]) -> tuple[nouns.Station, ...]:
    """Returns the seconds at each station of a request's way from protobuf."""
    return tuple(nouns.Station(s.name, s.seconds) for s in pb)


def layout_to_pb(layout: nouns.KvLayout) -> c.KvLayout:
    """Returns a KV layout as protobuf."""
    return c.KvLayout(
        version=layout.version,
        block_tokens=layout.block_tokens,
        dtype=layout.dtype,
        groups=[
            c.LayerGroup(
                kind=g.kind,
                planes=g.planes,
                layers=g.layers,
                kv_heads=g.kv_heads,
                head_dim=g.head_dim,
                window=g.window,
            )
            for g in layout.groups
        ],
        page_bytes=layout.page_bytes,
        shard_rank=layout.shard_rank,
        shard_count=layout.shard_count,
        fidelity=layout.fidelity,
        states=[c.StatePlane(name=s.name, layers=s.layers, shape=s.shape) for s in layout.states],
        windows=layout.windows,
    )


def layout_from_pb(pb: c.KvLayout) -> nouns.KvLayout:
    """Returns a KV layout from protobuf."""
    return nouns.KvLayout(
        dtype=pb.dtype,
        groups=tuple(
            nouns.LayerGroup(g.kind, tuple(g.planes), g.layers, g.kv_heads, g.head_dim, g.window) for g in pb.groups
        ),
        page_bytes=pb.page_bytes,
        fidelity=pb.fidelity,
        block_tokens=pb.block_tokens,
        shard_rank=pb.shard_rank,
        shard_count=pb.shard_count,
        version=pb.version,
        states=tuple(nouns.StatePlane(s.name, s.layers, tuple(s.shape)) for s in pb.states),
        windows=tuple(pb.windows),
    )


_INFO_STRUCTS = ("layout", "receivers", "role_error")
_INFO_FIELDS = tuple(f for f in nouns.WorkerInfo.__struct_fields__ if f not in _INFO_STRUCTS)
_INFO_LISTS = ("eos_token_ids", "adapters", "rank_hosts")
_INFO_MAPS = ("data_addresses", "widths")


def info_to_pb(info: nouns.WorkerInfo) -> w.WorkerInfo:
    """Returns a worker's description as protobuf."""
    receivers = [w.KvReceiver(address=each.address, part=extents_to_pb(each.part)) for each in info.receivers]
    fields = {f: getattr(info, f) for f in _INFO_FIELDS}
    failed = None if info.role_error is None else error_to_pb(info.role_error)
    return w.WorkerInfo(layout=layout_to_pb(info.layout), receivers=receivers, role_error=failed, **fields)


def info_from_pb(pb: w.WorkerInfo) -> nouns.WorkerInfo:
    """Returns a worker's description from protobuf."""
    fields = {f: getattr(pb, f) for f in _INFO_FIELDS}
    lists = {f: tuple(fields[f]) for f in _INFO_LISTS}
    maps = {f: dict(fields[f]) for f in _INFO_MAPS}
    receivers = tuple(nouns.KvReceiver(each.address, extents_from_pb(each.part)) for each in pb.receivers)
    failed = error_from_pb(pb.role_error) if pb.HasField("role_error") else None
    fields |= lists | maps
    return nouns.WorkerInfo(layout=layout_from_pb(pb.layout), receivers=receivers, role_error=failed, **fields)


def extents_to_pb(extents: Iterable[nouns.Extent]) -> list[w.Extent]:
    """Returns ranges of a page as protobuf."""
    return [w.Extent(at=each.at, bytes=each.bytes, stride=each.stride, count=each.count) for each in extents]


def extents_from_pb(pb: Iterable[w.Extent]) -> tuple[nouns.Extent, ...]:
    """Returns ranges of a page from protobuf."""
    return tuple([nouns.Extent(each.at, each.bytes, each.stride, each.count) for each in pb])


def snapshot_to_pb(s: nouns.PoolSnapshot) -> w.PoolSnapshot:
    """Returns a page pool's counts as protobuf."""
    return w.PoolSnapshot(**{f: getattr(s, f) for f in nouns.PoolSnapshot.__struct_fields__})


def snapshot_from_pb(pb: w.PoolSnapshot) -> nouns.PoolSnapshot:
    """Returns a page pool's counts from protobuf."""
    return nouns.PoolSnapshot(**{f: getattr(pb, f) for f in nouns.PoolSnapshot.__struct_fields__})


def adapter_to_pb(a: nouns.AdapterInfo) -> w.AdapterInfo:
    """Returns the description of an adapter that a worker holds as protobuf."""
    return w.AdapterInfo(**{f: getattr(a, f) for f in nouns.AdapterInfo.__struct_fields__})


def adapter_from_pb(pb: w.AdapterInfo) -> nouns.AdapterInfo:
    """Returns the description of an adapter that a worker holds from protobuf."""
    fields = {f: getattr(pb, f) for f in nouns.AdapterInfo.__struct_fields__}
    return nouns.AdapterInfo(**fields | {"targets": tuple(pb.targets)})


def error_to_pb(e: ErrorInfo) -> w.WireError:
    """Returns an error as its protobuf twin."""
    return w.WireError(type=e.type, message=e.message, param=e.param, retry_after_s=e.retry_after_s)


def error_from_pb(pb: w.WireError) -> ErrorInfo:
    """Returns an error, as data, from protobuf."""
    return ErrorInfo(pb.type, pb.message, pb.param, pb.retry_after_s)


def engine_request(pb: w.Admit | w.PrefillRequest) -> nouns.EngineRequest:
    """Returns the part of an Admit or PrefillRequest that the engine needs."""
    return nouns.EngineRequest(
        request_id=pb.request_id,
        token_ids=tuple(pb.token_ids),
        prompt_tokens=pb.prompt_tokens,
        sampling=sampling_from_pb(pb.sampling),
        choice=pb.choice,
        adapter_id=pb.adapter_id,
        tenant_salt=pb.tenant_salt,
        priority=pb.priority,
        prediction=tuple(pb.prediction) if isinstance(pb, w.Admit) else (),
        retained=pb.retained,
        retained_tokens=pb.retained_tokens,
    )
