"""The protobuf messages by which dispatch asks workers to run an attempt.

Pure; knows nothing of connections or retries.
"""

from __future__ import annotations

import msgspec

from baton.protos.convert import sampling_to_pb
from baton.protos.nouns import WorkerInfo
from baton.protos.v1 import common_pb2 as c
from baton.protos.v1 import worker_pb2 as w
from baton.router.policies import Option
from baton.router.request.request import RouterRequest
from baton.router.workers.decode_session import DecodeLease


class Attempt(msgspec.Struct, frozen=True):
    """Describes one try to serve a choice on one decode worker.

    ``wire_id`` names it in messages and is unique in this router. ``tokens`` are the prompt's ids followed by the
    outputs already emitted. ``traceparent`` is the W3C header of the span that it runs in.
    """

    request: RouterRequest
    choice: int
    wire_id: str
    tokens: tuple[int, ...]
    traceparent: str


def admit_message(attempt: Attempt, local: bool) -> w.Admit:
    """Returns the message that asks a decode worker for a lease; ``local``: that worker also prefills the
    prompt.
    """
    request, context = attempt.request, attempt.request.context
    return w.Admit(
        request_id=attempt.wire_id,
        model_id=request.model_id,
        adapter_id=context.adapter_id,
        token_ids=attempt.tokens,
        prompt_tokens=len(request.token_ids),
        sampling=_sampling(attempt),
        choice=attempt.choice,
        tenant_salt=context.tenant_salt,
        local=local,
        priority=context.priority,
        traceparent=attempt.traceparent,
        prediction=request.prediction,
        retained=context.retained,
        retained_tokens=context.retained_tokens,
    )


def prefill_message(
    attempt: Attempt, lease: DecodeLease, to: WorkerInfo, received: tuple[int, ...], taken: Option, router_id: str
) -> w.PrefillRequest:
    """Returns the message that asks a prefill worker to prefill the prompt and send its KV blocks to ``to``.

    ``received`` are the indices of blocks that arrived by an earlier prefill of the same lease.
    """
    request, context = attempt.request, attempt.request.context
    return w.PrefillRequest(
        request_id=lease.request_id,
        model_id=request.model_id,
        adapter_id=context.adapter_id,
        lease=lease.lease,
        epoch=lease.epoch,
        decode_address=to.address,
        decode_incarnation=to.incarnation,
        token_ids=attempt.tokens,
        prompt_tokens=len(request.token_ids),
        held_blocks=lease.held_blocks,
        received_blocks=received,
        sampling=_sampling(attempt),
        choice=attempt.choice,
        tenant_salt=context.tenant_salt,
        priority=context.priority,
        router_id=router_id,
        traceparent=attempt.traceparent,
        fetch_address=taken.fetch_address,
        fetch_blocks=taken.fetch_blocks,
        fetch_limit_s=taken.fetch_limit_s,
        retained=context.retained,
        retained_tokens=context.retained_tokens,
    )


def _sampling(attempt: Attempt) -> c.Sampling:
    """Returns the request's sampling; the prompt is scored once, for the first choice."""
    out = sampling_to_pb(attempt.request.sampling)
    if attempt.choice:
        out.ClearField("prompt_logprobs")
    return out
