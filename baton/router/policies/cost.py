"""cost: the way that is predicted to cost the fewest seconds, to this request and to those it would slow down.

Inputs: each worker's fitted curves, tokens that wait, sequences in its batch, cached blocks, KV bytes per block.
Terms of a way, in seconds, summed:

    queue  prompts ahead of ours at the worker that reads
    read   our uncached tokens there, in chunks
    ship   what is left of the transfer when the last chunk ends (blocks are pushed while later ones compute)
    write  our first WRITE_TOKENS outputs in the decode batch as it would be with us
    harm   how much longer everybody in that batch waits, over the same outputs: by one more sequence, and on
           the local way by our prompt's chunks in between

Intent: a cached prefix is worth exactly what it saves; a busy batch isn't interrupted by a long prompt; a short
uncached rest stays local. Example: 4,000 tokens, 3,900 cached at p1, p0 idle and p1 with 200 tokens to read:
p1 computes 300 and wins over p0's 4,000.
"""

from __future__ import annotations

from baton.cost.curves import decode_seconds, exposed_seconds, prefill_seconds
from baton.protos.nouns import BLOCK_TOKENS, StepCurve, TransferCurve
from baton.router.policies import Ask, Candidate, ClusterSnapshot, Decision, Option, least, local_ways, pairs

WRITE_TOKENS = 64
CHUNK_TOKENS = 512
RECORDED = 8
# Until a worker has reported its own: a small model on a few CPU cores.
UNKNOWN_STEP = StepCurve(2e-3, 5e-5, 1e-9, 2e-4, 1e-7)
UNKNOWN_TRANSFER = TransferCurve(1e-3, 1e-9)


def choose(snapshot: ClusterSnapshot, ask: Ask) -> Decision | None:
    """The cheapest way; equals take turns."""
    options = [Option("local", d.id, terms=_local(d, ask)) for d in local_ways(snapshot, ask)]
    options += [Option("prefill", d.id, p.id, _disaggregated(p, d, ask)) for p, d in pairs(snapshot, ask)]
    if not options:
        return None
    taken = least(options, snapshot.turn)
    return Decision("cost", taken, tuple(sorted(options, key=lambda o: o.cost)[:RECORDED]))


def _local(worker: Candidate, ask: Ask) -> dict[str, float]:
    read = _read_seconds(worker, ask)
    return {
        "queue": _queue_seconds(worker),
        "read": read,
        "write": _write_seconds(worker, ask),
        "harm": _crowding(worker, ask) + worker.running * read,
    }


def _disaggregated(reader: Candidate, writer: Candidate, ask: Ask) -> dict[str, float]:
    read = _read_seconds(reader, ask)
    return {
        "queue": _queue_seconds(reader),
        "read": read,
        "ship": _ship_seconds(reader, writer, ask, read),
        "write": _write_seconds(writer, ask),
        "harm": _crowding(writer, ask),
    }


def _queue_seconds(worker: Candidate) -> float:
    return prefill_seconds(_curve(worker), worker.waiting_tokens)


def _read_seconds(worker: Candidate, ask: Ask) -> float:
    uncached = ask.uncached(worker.id)
    return prefill_seconds(_curve(worker), uncached, ask.tokens - uncached)


def _ship_seconds(reader: Candidate, writer: Candidate, ask: Ask, read: float) -> float:
    curve = reader.load.transfer_curve or UNKNOWN_TRANSFER
    blocks = max(1, ask.blocks - ask.hits.get(writer.id, 0))
    last = min(blocks, CHUNK_TOKENS // BLOCK_TOKENS)
    block_bytes = writer.info.layout.page_bytes
    return exposed_seconds(curve, blocks * block_bytes, last * block_bytes, read)


def _write_seconds(worker: Candidate, ask: Ask) -> float:
    return _outputs(ask) * _step_seconds(worker, ask, 1)


def _crowding(worker: Candidate, ask: Ask) -> float:
    """Everybody's wait for our share of each step."""
    return worker.running * _outputs(ask) * (_step_seconds(worker, ask, 1) - _step_seconds(worker, ask, 0))


def _step_seconds(worker: Candidate, ask: Ask, added: int) -> float:
    context = worker.load.leased_pages * BLOCK_TOKENS + added * ask.tokens
    return decode_seconds(_curve(worker), worker.running + added, context)


def _curve(worker: Candidate) -> StepCurve:
    return worker.load.step_curve or UNKNOWN_STEP


def _outputs(ask: Ask) -> int:
    return min(ask.max_new_tokens, WRITE_TOKENS)
