"""Traces of requests: Mooncake JSONL and Azure CSV, read into one form. Torch-free.

Knows nothing of what is done with them. An unreadable line is an error that names the line and the reason, or is
skipped and reported if the caller chooses.
"""

from __future__ import annotations

import csv
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from baton.protos.errors import InvalidRequest
from baton.protos.nouns import RECORDED_ADAPTERS

MOONCAKE_BLOCK_TOKENS = 512  # tokens of a block in the Mooncake traces
MAX_LENGTH = 1 << 24  # tokens of a prompt or an answer at most
MAX_TIME_S = 253_402_300_800.0  # seconds at most: those of the year 10,000, so that a wrong unit is noticed


class TraceError(InvalidRequest):
    """Says that a line of a trace can't be read; ``line`` counts from 1."""

    label = "invalid_request"

    def __init__(self, source: str, line: int, reason: str) -> None:
        super().__init__(f"{source} line {line}: {reason}", "trace")
        self.line, self.reason = line, reason


class TraceRequest(msgspec.Struct, frozen=True, array_like=True):
    """Describes one request: arrival in seconds since the trace began, tokens in and out, chained ids of the
    prompt's blocks.

    ``adapter`` numbers its LoRA adapter; 0: none.
    """

    arrival: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    adapter: int = 0


class Trace(msgspec.Struct, frozen=True):
    """Holds requests in order of arrival.

    ``block_tokens`` is the number of tokens per hash id (the last one may have fewer). ``skipped`` are messages
    about unreadable lines.
    """

    source: str
    requests: tuple[TraceRequest, ...]
    block_tokens: int = MOONCAKE_BLOCK_TOKENS
    skipped: tuple[str, ...] = ()

    @property
    def duration(self) -> float:
        """Returns the seconds from the first to the last arrival."""
        return self.requests[-1].arrival - self.requests[0].arrival if self.requests else 0.0

    @property
    def has_hashes(self) -> bool:
        """Returns whether any request has hash ids, which say what prompts share."""
        return any(r.hash_ids for r in self.requests)

    @property
    def adapted_share(self) -> float:
        """Returns the share of all tokens, in and out, of requests on an adapter."""
        return sum(self.adapter_shares)

    @property
    def adapter_shares(self) -> tuple[float, ...]:
        """Returns each adapter's share of all tokens, in and out, the largest first."""
        tokens: Counter[int] = Counter()
        for r in self.requests:
            tokens[r.adapter] += r.input_length + r.output_length
        total = max(1, tokens.total())
        return tuple(count / total for adapter, count in tokens.most_common() if adapter)

    def between(self, start: float, end: float) -> Trace:
        """Returns the requests that arrive in [``start``, ``end``) seconds, shifted to begin at 0."""
        inside = (r for r in self.requests if start <= r.arrival < end)
        moved = tuple(msgspec.structs.replace(r, arrival=r.arrival - start) for r in inside)
        return msgspec.structs.replace(self, requests=moved)

    def faster(self, factor: float) -> Trace:
        """Returns the same requests, arriving ``factor`` times as fast."""
        moved = tuple(msgspec.structs.replace(r, arrival=r.arrival / factor) for r in self.requests)
        return msgspec.structs.replace(self, requests=moved)

    def sample(self, count: int, rng: random.Random) -> Trace:
        """Returns ``count`` requests drawn at random, in order of arrival."""
        picked = sorted(rng.sample(range(len(self.requests)), min(count, len(self.requests))))
        return msgspec.structs.replace(self, requests=tuple(self.requests[i] for i in picked))


def read_trace(path: str, skip_bad: bool = False, from_zero: bool = True) -> Trace:
    """Reads a .jsonl (Mooncake) or .csv (Azure) file. Raises TraceError at an unreadable line unless ``skip_bad``,
    InvalidRequest for an unusable file.

    Times begin at the first arrival; without ``from_zero`` they are the file's own.
    """
    file = Path(path)
    reader = {".jsonl": _mooncake, ".csv": _azure}.get(file.suffix)
    if reader is None:
        raise InvalidRequest(f"{path}: a trace is a .jsonl (Mooncake) or a .csv (Azure) file", "trace")
    skipped: list[str] = []
    try:
        with file.open(encoding="utf-8-sig", newline="") as stream:
            found = list(_checked(reader(stream), file.name, skipped if skip_bad else None))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"can't read the trace {path}: {error}", "trace") from error
    if not found:
        raise InvalidRequest(f"{path} holds no request that can be read", "trace")
    found.sort(key=lambda r: r.arrival)
    first = found[0].arrival if from_zero else 0.0
    moved = tuple(msgspec.structs.replace(r, arrival=r.arrival - first) for r in found)
    return Trace(file.name, moved, skipped=tuple(skipped))


def joined(traces: Sequence[Trace]) -> Trace:
    """Returns several files of one cluster as one trace, by arrival, with hash ids and adapters renumbered.

    Hash ids mean the same in all files, and so do adapters' numbers of RECORDED_ADAPTERS and above, as routers
    give them; lower ones are numbered per file.
    """
    adapters: dict[tuple[int | None, int], int] = {}
    requests = sorted(
        (_renumbered(r, at, adapters) for at, t in enumerate(traces) for r in t.requests), key=lambda r: r.arrival
    )
    first = requests[0].arrival
    dense: dict[int, int] = {}
    renumbered = tuple(
        msgspec.structs.replace(
            r, arrival=r.arrival - first, hash_ids=tuple(dense.setdefault(i, len(dense)) for i in r.hash_ids)
        )
        for r in requests
    )
    return Trace(
        "+".join(t.source for t in traces), renumbered, skipped=tuple(s for t in traces for s in t.skipped)
    )


def _renumbered(request: TraceRequest, file: int, adapters: dict[tuple[int | None, int], int]) -> TraceRequest:
    if not request.adapter:
        return request
    of = None if request.adapter >= RECORDED_ADAPTERS else file
    number = adapters.setdefault((of, request.adapter), len(adapters) + 1)
    return msgspec.structs.replace(request, adapter=number)


def to_mooncake(trace: Trace) -> bytes:
    """Returns the trace as Mooncake JSONL, timestamps in milliseconds."""
    lines = (
        {
            "timestamp": round(r.arrival * 1e3),
            "input_length": r.input_length,
            "output_length": r.output_length,
            "hash_ids": list(r.hash_ids),
        }
        | ({"adapter": r.adapter} if r.adapter else {})
        for r in trace.requests
    )
    return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)


Parsed = tuple[int, Callable[[], TraceRequest]]


def _checked(lines: Iterator[Parsed], source: str, skipped: list[str] | None) -> Iterator[TraceRequest]:
    for number, parse in lines:
        try:
            request = parse()
            _require_sound(request)
        except (ValueError, KeyError, TypeError, msgspec.DecodeError) as error:
            reason = f"{error.args[0]} is missing" if isinstance(error, KeyError) else str(error)
            bad = TraceError(source, number, reason)
            if skipped is None:
                raise bad from error
            skipped.append(bad.message)
        else:
            yield request


def _require_sound(request: TraceRequest) -> None:
    for name in ("input_length", "output_length"):
        value = getattr(request, name)
        if not 1 <= value <= MAX_LENGTH:
            raise ValueError(f"{name} is {value}; it must be 1..{MAX_LENGTH}")
    if request.adapter < 0:
        raise ValueError(f"adapter is {request.adapter}; it must be a number from 1 on, or 0 for none")
    if not 0 <= request.arrival < MAX_TIME_S:
        raise ValueError(f"the time is {request.arrival:g} s; it must be 0 or later, and before the year 10000")
    blocks = -(-request.input_length // MOONCAKE_BLOCK_TOKENS)
    if request.hash_ids and len(request.hash_ids) != blocks:
        raise ValueError(f"{len(request.hash_ids)} hash_ids; {request.input_length} tokens have {blocks} blocks")


# ---- Mooncake: {"timestamp": ms, "input_length": n, "output_length": n, "hash_ids": [...]} -----------------------


class _MooncakeLine(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()
    adapter: int = 0


def _mooncake(stream: Iterable[str]) -> Iterator[Parsed]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for number, line in enumerate(stream, 1):
        if line.strip():
            yield number, lambda line=line: _from_mooncake(decoder.decode(line))  # type: ignore[misc]


def _from_mooncake(line: _MooncakeLine) -> TraceRequest:
    times = line.timestamp / 1e3, line.input_length, line.output_length
    return TraceRequest(*times, line.hash_ids, line.adapter)


# ---- Azure: TIMESTAMP,ContextTokens,GeneratedTokens -----------------------------------------------------------


def _azure(stream: Iterable[str]) -> Iterator[Parsed]:
    for number, row in enumerate(csv.DictReader(stream), 2):
        yield number, lambda row=row: _from_azure(row)  # type: ignore[misc]


def _from_azure(row: dict[str, str]) -> TraceRequest:
    stamp = row["TIMESTAMP"]
    if stamp is None or None in row:
        raise ValueError("it must have the fields TIMESTAMP, ContextTokens and GeneratedTokens")
    return TraceRequest(
        _seconds(datetime.fromisoformat(stamp.strip())), int(row["ContextTokens"]), int(row["GeneratedTokens"])
    )


def _seconds(at: datetime) -> float:
    """Returns Unix seconds; a time without a zone is taken as UTC."""
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()
