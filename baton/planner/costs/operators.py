"""Step times from operator timings: a folder with attention.csv, dense.csv, per_sequence.csv and meta.yaml.

Knows nothing of schedulers or traces. The format is LLMServingSim's (one layer, per tensor-parallel rank, in
microseconds); the model's layers and widths come from its public config.json, communication from ``RankLink``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import msgspec

from baton.planner.costs.grid import Axis
from baton.planner.costs.model_shape import ModelShape, model_shape
from baton.planner.costs.profile_meta import ProfileMeta
from baton.protos.errors import ConfigError

ONCE = ("embedding", "final_layernorm")
TWICE = ("layernorm",)
HEAD = "lm_head"
MICRO = 1e-6  # seconds in a microsecond


class RankLink(msgspec.Struct, frozen=True):
    """Describes the link between tensor-parallel ranks: bytes per second one way, and seconds of latency."""

    bytes_per_s: float
    latency_s: float


class PrefillChunk(msgspec.Struct, frozen=True, array_like=True):
    """Describes ``new`` prompt tokens to compute after ``context`` tokens whose KV is present."""

    new: int
    context: int


class OperatorProfile:
    """Predicts the seconds of any engine step on the measured hardware.

    ``skew`` is the weight of the longest context in attention over unequal ones. Raises ConfigError for several
    ranks without a ``link``.
    """

    def __init__(
        self, shape: ModelShape, tp: int, tables: _Tables, link: RankLink | None, skew: float = 0.0
    ) -> None:
        if tp > 1 and link is None:
            raise ConfigError(f"{tp} ranks communicate: the run's config needs link_bw and link_latency", "link_bw")
        self.shape, self.tp, self.link, self.skew = shape, tp, link, skew
        self._tables = tables
        self._dense: dict[int, float] = {}
        self._heads: dict[int, float] = {}

    def step_seconds(
        self, chunks: Sequence[PrefillChunk], decodes: Sequence[int], finishing: int | None = None
    ) -> float:
        """Returns the seconds of a step: prefill ``chunks``, and one token each for sequences with ``decodes``
        tokens of context.

        ``finishing`` of the chunks are their prompt's last (default: all) and need logits.
        """
        tokens = sum(c.new for c in chunks) + len(decodes)
        sampled = len(decodes) + (len(chunks) if finishing is None else finishing)
        if tokens == 0:
            return 0.0
        attention = self.shape.num_hidden_layers * self.attention_seconds(chunks, decodes)
        return self._body(tokens) + attention + self._head(max(1, sampled))

    def attention_seconds(self, chunks: Sequence[PrefillChunk], decodes: Sequence[int]) -> float:
        """Returns the seconds of one layer's attention over the batch."""
        n = len(decodes)
        mean = sum(decodes) / n if n else 0.0
        seconds = self._attention(chunks, n, mean)
        if self.skew and n > 1 and not chunks:
            seconds += self.skew * (self._attention(chunks, n, max(decodes)) - seconds)
        return seconds

    def _attention(self, chunks: Sequence[PrefillChunk], n: int, context: float) -> float:
        if not chunks:
            return self._tables.decode.at(n, context)
        new, before = _one_chunk(chunks)
        if n == 0:
            return self._tables.prefill.at(new, before)
        return self._tables.mixed.at(new, before, n, context)

    def _body(self, tokens: int) -> float:
        """Everything that is done per token: the layers' matrices, norms and communication, the embedding."""
        known = self._dense.get(tokens)
        if known is None:
            per_layer = once = 0.0
            for layer, axis in self._tables.dense.items():
                seconds = axis.at(tokens)
                if layer in ONCE:
                    once += seconds
                else:
                    per_layer += seconds * (2 if layer in TWICE else 1)
            reduces = 2 * self.shape.num_hidden_layers + 1
            known = self.shape.num_hidden_layers * per_layer + once + reduces * self._all_reduce(tokens)
            self._dense[tokens] = known
        return known

    def _head(self, sequences: int) -> float:
        known = self._heads.get(sequences)
        if known is None:
            known = sum(axis.at(sequences) for axis in self._tables.per_sequence.values())
            known += self._gather(sequences)
            self._heads[sequences] = known
        return known

    def _all_reduce(self, tokens: int) -> float:
        """A ring: 2 (n - 1) pieces of 1/n of the activations; its two rounds are pipelined, so n - 1 latencies."""
        if self.link is None or self.tp == 1:
            return 0.0
        size = tokens * self.shape.hidden_size * self.shape.bytes_per_value
        return (self.tp - 1) * (self.link.latency_s + 2 * size / self.tp / self.link.bytes_per_s)

    def _gather(self, sequences: int) -> float:
        """Returns the seconds for which each rank's share of the vocabulary's logits goes once around."""
        if self.link is None or self.tp == 1:
            return 0.0
        size = sequences * self.shape.vocab_size * self.shape.bytes_per_value
        return (self.tp - 1) * (self.link.latency_s + size / self.tp / self.link.bytes_per_s)


def _one_chunk(chunks: Sequence[PrefillChunk]) -> tuple[float, float]:
    """One (new, context) with as many token pairs as ``chunks`` have together, and if possible as many tokens."""
    if len(chunks) == 1:
        return chunks[0].new, chunks[0].context
    new = sum(c.new for c in chunks)
    pairs = sum(c.new * (c.context + c.new / 2) for c in chunks)
    context = pairs / new - new / 2
    return (new, context) if context >= 0 else (math.sqrt(2 * pairs), 0.0)


class _Tables(msgspec.Struct, frozen=True):
    prefill: Axis
    decode: Axis
    mixed: Axis
    dense: dict[str, Axis]
    per_sequence: dict[str, Axis]


def load_operators(
    folder: str, tp: int | None = None, link: RankLink | None = None, model: str | None = None
) -> OperatorProfile:
    """Returns the profile in ``folder``. ``model`` (a name or config.json) gives the sizes if meta.yaml names no
    known model.

    Timings are read from the subfolder of ``tp`` ranks (tp1, tp2, …) if there is one, else from the folder. Raises
    ConfigError naming the file and row, or what doesn't fit.
    """
    home = Path(folder)
    meta = ProfileMeta(home)
    if not (model or meta.model):
        raise ConfigError(f"{home}/meta.yaml names no model; give one (--model)", "profile")
    shape = model_shape(model or meta.model)
    shape = msgspec.structs.replace(shape, name=(meta.model or shape.name).rsplit("/", 1)[-1].lower())
    tp = tp or meta.degree_of_widths(shape) or (meta.degrees or [1])[0]
    own = home / f"tp{tp}"
    tables = _tables(own if own.is_dir() else home)
    if not own.is_dir():
        head = tables.per_sequence.get(HEAD)
        meta.require_fit(shape, tp, None if head is None else head.at(1))
    return OperatorProfile(shape, tp, tables, link, meta.skew(tp))


def _tables(home: Path) -> _Tables:
    attention = _rows(home / "attention.csv", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"))
    prefill = [(k[:2], s) for k, s in attention if k[0] and not k[2]]
    decode = [(k[2:], s) for k, s in attention if not k[0] and k[2]]
    mixed = [(k, s) for k, s in attention if k[0] and k[2]]
    if not (prefill and decode and mixed):
        raise ConfigError(f"{home}/attention.csv needs rows with prefill, with decodes, and with both", "profile")
    return _Tables(
        Axis(prefill), Axis(decode), Axis(mixed), _by_layer(home / "dense.csv", "tokens"),
        _by_layer(home / "per_sequence.csv", "sequences"),
    )  # fmt: skip


def _by_layer(file: Path, size: str) -> dict[str, Axis]:
    rows: dict[str, list[tuple[tuple[float, ...], float]]] = {}
    for line, row in _lines(file):
        rows.setdefault(row.get("layer", ""), []).append(_parsed(file, line, row, (size,)))
    return {layer: Axis(found) for layer, found in rows.items()}


def _rows(file: Path, key: tuple[str, ...]) -> list[tuple[tuple[float, ...], float]]:
    return [_parsed(file, line, row, key) for line, row in _lines(file)]


def _lines(file: Path) -> list[tuple[int, dict[str, str]]]:
    try:
        with file.open(encoding="utf-8", newline="") as stream:
            return list(enumerate(csv.DictReader(stream), 2))
    except OSError as error:
        raise ConfigError(f"a profile needs {file}: {error}", "profile") from error


def _parsed(file: Path, line: int, row: dict[str, str], key: tuple[str, ...]) -> tuple[tuple[float, ...], float]:
    try:
        point, seconds = tuple(float(row[name]) for name in key), float(row["time_us"]) * MICRO
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{file} line {line}: {error}", "profile") from error
    if not (seconds >= 0.0 and all(x >= 0 for x in point)):
        raise ConfigError(f"{file} line {line}: sizes and times can't be negative", "profile")
    return point, seconds
