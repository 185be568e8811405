"""Loads a program's weights, plain or quantized, from any form of checkpoint, quantizing them on load if asked,
with a cache.

Knows nothing of how a form looks inside (quant/) or of files' formats (safetensors.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, compress
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from baton.engine.checkpoints.content_hashes import content_hashes
from baton.engine.checkpoints.kv_scheme import require_sound_scales
from baton.engine.checkpoints.layer_schemes import LayerSchemes
from baton.engine.checkpoints.packed_cache import packed_weights
from baton.engine.checkpoints.safetensors import Checkpoint
from baton.engine.config import EngineConfig
from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Linear, LmHead
from baton.engine.program.program import Program, Weight
from baton.engine.program.rank_program import RankProgram, Rows
from baton.engine.program.stacked import own_source
from baton.engine.quant import NONE, UNREADABLE, Reader, on_load, reader_of, unreadable
from baton.engine.quant.gguf import GgufCheckpoint
from baton.kernels.linear.integers import Part, packed_of, values_of
from baton.kernels.linear.packed import BF16, E4M3_A8, VERSION, PackedWeight, beside, own_rows, pack_bf16
from baton.protos.errors import CheckpointError, ConfigError

HEAD = "head"
AS_STORED = "checkpoint"  # the scheme of weights that are quantized in the checkpoint
Weights = dict[str, Tensor | PackedWeight]
Share = Callable[[Program], RankProgram]


RowSource = Callable[[str, Rows], Tensor | PackedWeight]  # reads ranges of rows of a stacked weight


class Opened(NamedTuple):
    """Holds a checkpoint whose headers were read, and the reader of its quantized weights, None if it has none."""

    checkpoint: Checkpoint | GgufCheckpoint
    reader: Reader | None


class LoadedWeights(NamedTuple):
    """Holds the weights of a model. ``program`` differs from the one passed in if a tied head got weights of its
    own. ``rows_of`` reads further rows of weights, in the form that these have.
    """

    program: Program
    weights: Weights
    fingerprint: str  # hex SHA-256 of checkpoint and quantization
    rows_of: RowSource


def load_weights(
    config: EngineConfig,
    directory: Path,
    model: ModelConfig,
    program: Program,
    dtype: torch.dtype,
    share: Share | None = None,
    opened: Opened | None = None,
) -> LoadedWeights:
    """Reads the weights of ``program``, quantizes them if asked, or maps those that an earlier start quantized.

    Plain weights are on ``config.device`` in ``dtype``; if any is packed, all are in host memory. ``share``
    computes a rank's part of the program; None for all. ``opened`` is the checkpoint, None to open it here. Raises
    CheckpointError and ConfigError.
    """
    checkpoint, reader = opened or open_checkpoint(directory, model)
    config = _fitting(config, reader)
    _require_possible(config, reader)
    if isinstance(checkpoint, Checkpoint) and reader is not None:
        require_sound_scales(checkpoint)
    fingerprint = checkpoint.fingerprint(model.fields, partial(content_hashes, directory=config.cache_dir))
    overrides = dict(config.quantization_overrides)
    is_plain = reader is None and config.quantization == NONE and not overrides
    if isinstance(checkpoint, Checkpoint) and is_plain:
        if config.activations != "auto" and not config.is_draft:
            text = f"activations is {config.activations}, and no weight is quantized; use auto, or set quantization"
            raise ConfigError(text, "activations")
        wanted, rows = _own(program, share)
        plain_weights = checkpoint.weights(wanted, dtype, config.device, rows)
        return LoadedWeights(program, dict(plain_weights), fingerprint, _rows_of_plain(program, checkpoint, dtype))
    scheme = config.quantization if reader is None else AS_STORED
    mixed = f" {list(overrides.items())}" if overrides else ""
    fingerprint = hashlib.sha256(f"{fingerprint} {scheme} {VERSION}{mixed}".encode()).hexdigest()
    own = own_head(program)
    schemes = None if reader is not None else LayerSchemes(config.quantization, overrides, HEAD, config.is_draft)
    make = _Maker(own, checkpoint, reader, schemes)
    packed = packed_weights(fingerprint, scheme, make.packed, config.cache_dir)
    packed = with_rows(packed, config.activations, config.is_draft)
    if config.activations != "auto":
        fingerprint = hashlib.sha256(f"{fingerprint} {config.activations}".encode()).hexdigest()
    plain = [weight for weight in _own(own, share)[0] if weight.name not in packed]
    experts = {name for op in own.experts for name in (op.gate_up, op.down)}
    # Those that the checkpoint's maker left unquantized.
    kinds = dict.fromkeys(experts, torch.bfloat16) if reader is not None else {}
    weights = {weight.name: make.plain(weight, kinds.get(weight.name, dtype)) for weight in plain}
    rows_of = _rows_of_packed(own, packed, lambda weight: make.plain(weight, kinds.get(weight.name, dtype)))
    return LoadedWeights(own, dealt(own, weights | packed, share), fingerprint, rows_of)


def is_quantized(config: EngineConfig, opened: Opened) -> bool:
    """Returns whether ``load_weights`` may pack any weight of a checkpoint."""
    return bool(config.quantization != NONE or config.quantization_overrides or opened.reader)


def open_checkpoint(directory: Path, model: ModelConfig) -> Opened:
    """Reads the headers of the checkpoint in ``directory``. Raises CheckpointError."""
    if found := GgufCheckpoint.find(directory, model):
        return Opened(found, found)
    checkpoint = Checkpoint(directory)
    return Opened(checkpoint, reader_of(model, checkpoint))


def _rows_of_plain(program: Program, checkpoint: Checkpoint, dtype: torch.dtype) -> RowSource:
    named = {weight.name: weight for weight in program.weights}
    return lambda name, rows: checkpoint.weights([named[name]], dtype, "cpu", {name: rows})[name]


def _rows_of_packed(
    program: Program, packed: dict[str, PackedWeight], plain: Callable[[Weight], Tensor]
) -> RowSource:
    named = {weight.name: weight for weight in program.weights}

    def rows_of(name: str, rows: Rows) -> Tensor | PackedWeight:
        if name in packed:
            return _dealt(program, name, packed[name], {name: rows})
        weight, own = _narrowed(named[name], rows)
        return _dealt(program, name, plain(weight), {name: own})

    return rows_of


def _narrowed(weight: Weight, rows: Rows) -> tuple[Weight, Rows]:
    """Returns ``weight`` with only those sources of which ``rows`` has some, and where it has these rows."""
    if not weight.sources:
        return weight, rows
    ends = list(accumulate(shape[0] for shape in weight.shapes))
    spans = [(end - shape[0], end) for shape, end in zip(weight.shapes, ends, strict=True)]
    is_kept = [any(begin < last and first < end for first, last in rows) for begin, end in spans]

    def moved(row: int) -> int:
        return row - sum(
            end - begin for (begin, end), kept in zip(spans, is_kept, strict=True) if not kept and end <= row
        )

    sources, shapes = (tuple(compress(each, is_kept)) for each in (weight.sources, weight.shapes))
    return msgspec.structs.replace(weight, sources=sources, shapes=shapes), tuple(
        (moved(a), moved(b)) for a, b in rows
    )


def with_rows(packed: dict[str, PackedWeight], activations: str, is_draft: bool = False) -> dict[str, PackedWeight]:
    """Returns the weights set up for activations rounded to ``activations``, "auto", "bf16" or "fp8". Raises
    ConfigError if "fp8" fits none of them, unless they are a draft model's.
    """
    if activations == "auto":
        return packed
    if activations == "bf16":
        return {name: weight.with_bf16_rows() for name, weight in packed.items()}
    found = {name: weight.with_published_rows() for name, weight in packed.items()}
    if not (is_draft or any(weight.kind == E4M3_A8 for weight in found.values())):
        text = (
            "activations is fp8, but the checkpoint has no fp8 weights that are meant for fp8 activations; use auto"
        )
        raise ConfigError(text, "activations")
    return found


def dealt(program: Program, weights: Weights, share: Share | None) -> Weights:
    """Returns a rank's part of the weights of ``program``: of each weight that is split, a copy of the rank's
    rows.
    """
    wanted, rows = _own(program, share)
    return {weight.name: _dealt(program, weight.name, weights[weight.name], rows) for weight in wanted}


def _own(program: Program, share: Share | None) -> tuple[tuple[Weight, ...], dict[str, Rows]]:
    """Returns the weights that a rank has, and the rows of each that is split; all of them without ``share``."""
    if share is None:
        return program.weights, {}
    own = share(program)
    return own.program.weights, own.rows


def _dealt(
    program: Program, name: str, weight: Tensor | PackedWeight, rows: dict[str, Rows]
) -> Tensor | PackedWeight:
    """Returns the rank's rows of a weight. In a packed layer each expert begins with a panel, and thus may be
    padded.
    """
    if name not in rows:
        return weight
    if isinstance(weight, Tensor):
        return torch.cat([weight[begin:end] for begin, end in rows[name]])
    stacked = next(sum(shape[0] for shape in of.shapes) for of in program.weights if of.name == name)
    experts = {w: op.experts for op in program.experts for w in (op.gate_up, op.down)}.get(name, 1)
    each, padded = stacked // experts, weight.n // experts
    return own_rows(
        weight, [(a // each * padded, b // each * padded) if experts > 1 else (a, b) for a, b in rows[name]]
    )


def own_head(program: Program) -> Program:
    """Returns the program with a head weight of its own, apart from the embedding table, which stays unquantized
    for look-ups.
    """
    last = program.ops[-1]
    if not isinstance(last, LmHead) or last.weight == HEAD:
        return program
    table = next(weight for weight in program.weights if weight.name == last.weight)
    head = msgspec.structs.replace(table, name=HEAD)
    ops = (*program.ops[:-1], msgspec.structs.replace(last, weight=HEAD))
    return msgspec.structs.replace(program, ops=ops, weights=(*program.weights, head))


def _fitting(config: EngineConfig, reader: Reader | None) -> EngineConfig:
    """Returns the config; that of a draft model which is quantized already loses the target's quantization."""
    if not config.is_draft or reader is None:
        return config
    return msgspec.structs.replace(config, quantization=NONE, quantization_overrides={})


def _require_possible(config: EngineConfig, reader: Reader | None) -> None:
    if config.quantization != NONE:
        on_load(config.quantization)
        if reader is not None:
            text = f"quantization is {config.quantization}, but the checkpoint is quantized already; use none"
            raise ConfigError(text, "quantization")
    if config.quantization_overrides and reader is not None:
        text = "quantization_overrides are for plain checkpoints, and this one is quantized already; leave them out"
        raise ConfigError(text, "quantization_overrides")
    if config.device != "cpu" and config.activations != "auto":
        text = f"activations {config.activations} is known on the cpu only, device is {config.device}; use auto"
        raise ConfigError(text, "activations")


class _Maker:
    """Reads and packs one weight after the other, so that memory holds little more than the packed ones."""

    def __init__(
        self,
        program: Program,
        checkpoint: Checkpoint | GgufCheckpoint,
        reader: Reader | None,
        schemes: LayerSchemes | None,
    ) -> None:
        self._program, self._checkpoint, self._reader, self._schemes = program, checkpoint, reader, schemes

    def packed(self) -> dict[str, PackedWeight]:
        """Returns every matrix that a Linear, the head or an expert multiplies by, packed, by name."""
        wanted = {op.weight for op in self._program.ops if isinstance(op, Linear | LmHead)} - self._program.routers
        experts = {name: op.experts for op in self._program.experts for name in (op.gate_up, op.down)}
        found: dict[str, PackedWeight | None] = {}
        rounded = [weight for weight in self._program.weights if weight.name in wanted or weight.name in experts]
        schemes = {weight.name: self._scheme_of(weight) for weight in rounded}  # of all, before any is read
        if self._schemes is not None:
            self._schemes.require_used(rounded)
        for weight in rounded:
            scheme = schemes[weight.name]
            if scheme == NONE:
                continue
            if weight.name in wanted:
                found[weight.name] = self._pack(weight, scheme)
            else:
                found[weight.name] = self._pack_experts(weight, experts[weight.name], scheme)
        return {name: weight for name, weight in found.items() if weight is not None}

    def _scheme_of(self, weight: Weight) -> str:
        return AS_STORED if self._schemes is None else self._schemes.of(weight)

    def plain(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        """Returns a weight as a tensor: norms, biases, the embedding table."""
        if not weight.sources:
            return torch.full(weight.shapes[0], weight.plus)
        kind = torch.float32 if weight.is_float32 else dtype
        found = torch.cat([values_of(part).to(kind) for part in self._parts(weight)])
        return (found + weight.plus) * weight.times if weight.is_changed else found

    def _pack_experts(self, weight: Weight, experts: int, scheme: str) -> PackedWeight | None:
        """Packs experts one by one and puts them side by side; returns None if the checkpoint leaves them
        unquantized, or their forms differ.
        """
        each, found = len(weight.sources) // experts, []
        for at in range(0, len(weight.sources), each):
            own = slice(at, at + each)
            one = msgspec.structs.replace(weight, sources=weight.sources[own], shapes=weight.shapes[own])
            packed = self._pack(one, scheme)
            if self._reader is not None and packed.kind == BF16:
                return None
            found.append(packed)
        return beside(found)

    def _pack(self, weight: Weight, scheme: str) -> PackedWeight:
        """Returns the ``weight`` packed by ``scheme``, or by the checkpoint's own form. Raises CheckpointError."""
        parts = self._parts(weight)
        try:
            if (packed := packed_of(parts)) is not None:
                return packed
            whole = torch.cat([values_of(part).float() for part in parts])
        except UNREADABLE as error:
            if self._reader is None:
                raise
            raise self._error(weight.sources[0], unreadable(error)) from error
        if self._reader is not None:  # left unquantized by who made the checkpoint
            return pack_bf16(whole)
        rounds = on_load(scheme)
        return rounds.pack_head(whole) if weight.name == HEAD else rounds.pack(whole)

    def _parts(self, weight: Weight) -> Sequence[Tensor | Part]:
        return [self._read(name, shape) for name, shape in zip(weight.sources, weight.shapes, strict=True)]

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor | Part:
        name, found = self._quantized(name, shape)
        if found is None:
            plain = self._checkpoint.tensor(name, shape)
            if self._reader is not None and plain.dtype == torch.float8_e4m3fn:
                raise self._error(name, "is float8_e4m3fn and has no scales beside it; get the model again")
            return plain
        self._require_finite(name, found)
        size = tuple((found if isinstance(found, Tensor) else found[0]).shape)
        if size != shape:
            raise CheckpointError(f"tensor {name} has shape {size}, config.json asks for {shape}", "model")
        return found

    def _quantized(self, name: str, shape: tuple[int, ...]) -> tuple[str, Tensor | Part | None]:
        """Returns the quantized weight ``name``, None if it isn't quantized, and the name that it was found by: an
        expert's own, where the program names a part of all experts' tensor and each expert has tensors of its own.
        """
        if self._reader is None:
            return name, None
        own = own_source(name)
        try:
            found = self._reader.read(name, shape)
            if found is None and own is not None and (alone := self._reader.read(own, shape)) is not None:
                return own, alone
        except UNREADABLE as error:
            raise self._error(name, unreadable(error)) from error
        return name, found

    def _require_finite(self, name: str, found: Tensor | Part) -> None:
        """Raises CheckpointError if a scale or a zero point of a quantized weight is NaN or infinite."""
        if isinstance(found, Tensor):
            return
        for part in found[1:]:
            if isinstance(part, Tensor) and part.dtype == torch.float32 and not bool(part.isfinite().all()):
                text = "has a scale or a zero point that isn't finite; it is damaged, quantize the model again"
                raise self._error(name, text)

    def _error(self, name: str, problem: str) -> CheckpointError:
        """Returns an error about weight ``name`` that names the file and its scales, where there are any."""
        if not isinstance(self._checkpoint, Checkpoint):
            return CheckpointError(f"tensor {name} {problem}", "model")
        base, names = name.removesuffix("weight"), self._checkpoint.names()
        scales = (each for each in names if each.startswith(base) and "scale" in each.removeprefix(base))
        return self._checkpoint.error(next(scales, name), problem)
