"""Step time from operator timings: one folder with attention.csv, dense.csv, per_sequence.csv and meta.yaml.

Knows nothing of schedulers or traces. The format is LLMServingSim's (one layer, per tensor-parallel rank, in
microseconds); the model's layers and widths come from its public config.json, communication from ``Link``.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from baton.planner.grid import Axis
from baton.planner.model_shape import ModelShape, model_shape
from baton.protos.errors import ConfigError

ONCE = ("embedding", "final_layernorm")
TWICE = ("layernorm",)
MICRO = 1e-6


class Link(msgspec.Struct, frozen=True):
    """Between tensor-parallel ranks: bytes per second one way, seconds until the first byte arrives."""

    bytes_per_s: float
    latency_s: float


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """``new`` prompt tokens computed after ``context`` tokens that have their KV."""

    new: int
    context: int


class OperatorProfile:
    """Seconds of any step on the measured hardware."""

    def __init__(self, shape: ModelShape, tp: int, tables: _Tables, link: Link | None, skew: float = 0.0) -> None:
        if tp > 1 and link is None:
            raise ConfigError(f"{tp} ranks communicate: the run's config needs link_bw and link_latency", "link_bw")
        self.shape, self.tp, self.link, self.skew = shape, tp, link, skew
        self._tables = tables
        self._dense: dict[int, float] = {}
        self._heads: dict[int, float] = {}

    def step_seconds(self, chunks: Sequence[Chunk], decodes: Sequence[int], finishing: int | None = None) -> float:
        """One step: ``chunks`` of prompts and one token each for sequences with ``decodes`` tokens of context.

        ``finishing`` of the chunks are their prompt's last (default: all): those need logits too.
        """
        tokens = sum(c.new for c in chunks) + len(decodes)
        sampled = len(decodes) + (len(chunks) if finishing is None else finishing)
        if tokens == 0:
            return 0.0
        attention = self.shape.num_hidden_layers * self.attention_seconds(chunks, decodes)
        return self._body(tokens) + attention + self._head(max(1, sampled))

    def attention_seconds(self, chunks: Sequence[Chunk], decodes: Sequence[int]) -> float:
        """One layer's attention over the batch."""
        n = len(decodes)
        mean = sum(decodes) / n if n else 0.0
        seconds = self._attention(chunks, n, mean)
        if self.skew and n > 1 and not chunks:
            seconds += self.skew * (self._attention(chunks, n, max(decodes)) - seconds)
        return seconds

    def _attention(self, chunks: Sequence[Chunk], n: int, context: float) -> float:
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
        """Each rank's share of the vocabulary's logits goes once around."""
        if self.link is None or self.tp == 1:
            return 0.0
        size = sequences * self.shape.vocab_size * self.shape.bytes_per_value
        return (self.tp - 1) * (self.link.latency_s + size / self.tp / self.link.bytes_per_s)


def _one_chunk(chunks: Sequence[Chunk]) -> tuple[float, float]:
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
    folder: str, tp: int | None = None, link: Link | None = None, model: str | None = None
) -> OperatorProfile:
    """Read a profile folder. ``model`` (a config.json) gives the sizes of a model that isn't known by name.

    Raises ConfigError naming the file and the row, or what doesn't fit.
    """
    home = Path(folder)
    meta = _meta(home / "meta.yaml")
    name = str(meta.get("model", ""))
    shape = msgspec.structs.replace(model_shape(model or name), name=name.rsplit("/", 1)[-1].lower())
    degrees = [int(d) for d in meta.get("tp_degrees") or [1]]
    tp = tp or _measured_degree(meta, shape, degrees)
    _require_fit(meta, shape, tp, home)
    return OperatorProfile(shape, tp, _tables(home), link, _skew(meta, tp))


def _meta(file: Path) -> dict[str, Any]:
    try:
        meta = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"a profile needs {file}: {error}", "profile") from error
    if not isinstance(meta, dict):
        raise ConfigError(f"{file} must be a mapping that names the model", "profile")
    return meta


def _measured_degree(meta: dict[str, Any], shape: ModelShape, degrees: list[int]) -> int:
    heads = _overrides(meta).get("num_attention_heads")
    return shape.num_attention_heads // int(heads) if heads else degrees[0]


def _overrides(meta: dict[str, Any]) -> dict[str, Any]:
    engine = meta.get("engine_effective") or {}
    found: dict[str, Any] = engine.get("hf_overrides") or {}
    return found


def _require_fit(meta: dict[str, Any], shape: ModelShape, tp: int, home: Path) -> None:
    """One rank's widths in the profile must be the model's, divided by ``tp``."""
    measured = _overrides(meta)
    for field in ("intermediate_size", "num_attention_heads", "num_key_value_heads"):
        if field in measured and int(measured[field]) * tp != getattr(shape, field):
            raise ConfigError(
                f"{home}: measured with {field} {measured[field]} per rank; {shape.name} on {tp} ranks has"
                f" {getattr(shape, field) / tp:g}. Give the profile of this model and tensor parallelism",
                "profile",
            )


def _skew(meta: dict[str, Any], tp: int) -> float:
    """How far attention over unequal contexts lies from that over the mean one towards that over the longest."""
    fits = (meta.get("skew_fit") or {}).get("per_tp") or {}
    fit = fits.get(tp) or fits.get(str(tp)) or {}
    return float(fit.get("alpha_default", 0.0))


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
