"""Quantizes a checkpoint: embedding and head, then layer after layer; each is written before the next is read.

Knows nothing of flags. Peak memory is a layer in float32 and quantized, its largest product's second moments, and
one sample's rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from baton.engine.program.ops import Embedding, Op
from baton.engine.program.program import Program
from baton.engine.program.stacked import own_source
from baton.process.heap import return_freed_memory
from baton.protos.errors import ConfigError
from baton.quantize.formats import format_of, mxfp4
from baton.quantize.kv_scales import kv_product, kv_scales, require_plain_kv
from baton.quantize.layer_quantizer import LayerQuantizer, QuantizedLayer, quantized_names
from baton.quantize.layers import States, embed, layers_of, outside_layers, plain_products, require_own_kv
from baton.quantize.output import OutputFolder, writing_to
from baton.quantize.quantized_weight import QuantizedWeight
from baton.quantize.registers import live, weights_of
from baton.quantize.schemes import FORMATS, Recipe, needs_text, scheme_of
from baton.quantize.source import Source
from baton.quantize.tensor_file import PiecewiseTensor, whole

Told = Callable[[int, int], None]  # layers that are done, of all
PACKED = 8  # what a format's words hold of neighbouring rows: a product's rows must divide by it


def quantize(
    source: Source, recipe: Recipe, samples: Sequence[Sequence[int]], folder: Path, told: Told = lambda *_: None
) -> None:
    """Writes the quantized checkpoint to ``folder``, or resumes an interrupted run there.

    ``recipe`` is checked; ``samples`` have one length, and are empty if the method reads no text. ``told`` receives
    the number of finished layers and of all. Raises ConfigError and CheckpointError.
    """
    require_possible(source, recipe, folder)
    layers = layers_of(source.program)
    output = OutputFolder(folder, len(layers) + 1)
    with writing_to(folder):
        output.begin(_asked(source, recipe, samples))
        with output.held():
            _write(_Work(source, recipe, samples, output, layers), len(layers), told)
            settings = format_of(recipe).settings(recipe, _ignored(source, recipe))
            output.end(source.directory, source.config.fields | {"quantization_config": settings})


def _write(work: _Work, layers: int, told: Told) -> None:
    """Writes the stem, and each of the layers that isn't finished."""
    work.stem()
    for layer in range(work.first(), layers):
        told(layer, layers)
        work.layer(layer)
        work.release()
    told(layers, layers)


def require_possible(source: Source, recipe: Recipe, folder: Path) -> None:
    """Raises ConfigError for all that can be refused before a text is read or written, which may take hours: what
    the method or its format can't do with the model, and a ``folder`` that can't be written or gone on with.
    """
    if recipe.kv_cache_dtype:
        require_plain_kv(source.program, layers_of(source.program))
    if needs_text(recipe):
        require_own_kv(source.program)
    require_fitting(source, recipe)
    OutputFolder(folder, 1).require_usable(_settings(recipe))


def require_fitting(source: Source, recipe: Recipe) -> None:
    """Raises ConfigError if the format can't hold the model: naming the first tensor whose inputs or rows it can't
    divide into groups, or saying that the format is another model's.
    """
    _require_stacked_experts(source, recipe)
    group = scheme_of(recipe).group
    for name in _products(source.program, recipe):
        weight = source.weights[name]
        for at, (n, k) in zip(weight.sources, weight.shapes, strict=True):
            if k % (group or 32):
                text = (
                    f"tensor {at} has {k} inputs, which groups of {group or 32} don't divide: use another --group"
                )
                raise ConfigError(text, "group")
            if n % PACKED:
                raise ConfigError(f"tensor {at} has {n} rows; {recipe.format} packs {PACKED} together", "model")


def _require_stacked_experts(source: Source, recipe: Recipe) -> None:
    """Raises ConfigError if the format takes experts only, and the model's aren't stored as gpt-oss's are."""
    if not recipe.takes_experts_only:
        return
    sources = [at for name in _products(source.program, recipe) for at in source.weights[name].sources]
    if not sources or not all(map(mxfp4.is_gpt_oss, sources)):
        text = f"--format {recipe.format} holds gpt-oss's experts, and this model has none"
        raise ConfigError(f"{text}; use --format {FORMATS[recipe.method][0]}", "format")


def _products(program: Program, recipe: Recipe) -> list[str]:
    plain = plain_products(program, recipe)
    return [name for ops in layers_of(program) for name in quantized_names(ops, plain)]


def _ignored(source: Source, recipe: Recipe) -> list[str]:
    """Returns the modules whose matrices stay as they are, but for embeddings and the head: routers, those of no
    linear layer, and those of no layer.
    """
    quantized = set(_products(source.program, recipe))
    inside = {name for ops in layers_of(source.program) for name in weights_of(ops)} - quantized
    inside |= outside_layers(source.program)
    names = [
        at
        for weight in source.program.weights
        if weight.name in inside
        for at, shape in zip(weight.sources, weight.shapes, strict=False)  # a constant has a shape alone
        if len(shape) == 2 and at.endswith(".weight")
    ]
    return sorted(name.removesuffix(".weight") for name in names)


def _asked(source: Source, recipe: Recipe, samples: Sequence[Sequence[int]]) -> dict[str, str]:
    """Returns the settings that a resumed run must share with the interrupted one."""
    text = hashlib.sha256(repr([list(sample) for sample in samples]).encode()).hexdigest()
    return {"model": source.fingerprint(), "calibration": text, **_settings(recipe)}


def _settings(recipe: Recipe) -> dict[str, str]:
    """Returns those of the settings that need neither the model's files nor the text."""
    return {name: str(value) for name, value in msgspec.to_builtins(recipe).items()}


class _Work:
    """The state of a run between layers."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        samples: Sequence[Sequence[int]],
        output: OutputFolder,
        layers: list[tuple[Op, ...]],
    ) -> None:
        self._source, self._recipe, self._samples, self._output = source, recipe, samples, output
        self._layers, self._scheme = layers, scheme_of(recipe)
        self._needs_text = self._scheme.needs_text or bool(recipe.kv_cache_dtype)

    def stem(self) -> None:
        """Writes the weights outside of the layers, and prepares the first layer's input."""
        program, own = self._source.program, {name for ops in self._layers for name in weights_of(ops)}
        if not self._output.has(0):
            rest = [name for name in self._source.weights if name not in own]
            self._output.write(0, {at: t for name in rest for at, t in self._source.copied(name).items()})
        if self._needs_text and not any(self._output.work.glob("layer-*")):
            first = program.ops[0]
            assert isinstance(first, Embedding)
            states = States(self._output.work / "begin", len(self._samples), len(self._samples[0]))
            embed(program, self._source.rows, self._samples, states)
            self._output.keep(states, 0)

    def first(self) -> int:
        """Returns the number of the first layer that isn't finished."""
        if self._needs_text:
            # The newest input: an older one may be half deleted.
            return max(int(path.name.split("-")[1]) for path in self._output.work.glob("layer-*"))
        return next(
            (layer for layer in range(len(self._layers)) if not self._output.has(layer + 1)), len(self._layers)
        )

    def layer(self, layer: int) -> None:
        """Quantizes and writes one layer."""
        ops = self._layers[layer]
        own = weights_of(ops)
        names = [name for name in self._source.weights if name in own]
        dtypes = {name: self._source.dtype(name) for name in names}
        weights = self._source.wide(names)
        self._source.release()
        plain = plain_products(self._source.program, self._recipe)
        rounder = LayerQuantizer(
            self._source.program, ops, weights, self._source.weights, self._scheme, dtypes, plain
        )
        del weights
        found, states = self._over_text(layer, rounder) if self._needs_text else (rounder.quantize_alone(), None)
        self._output.write(layer + 1, self._tensors(found, names) | self._kv_scales(found, ops))
        if states is not None and layer + 1 < len(self._layers):
            self._output.keep(states, layer + 1)  # deletes this layer's input, which is no longer needed

    def release(self) -> None:
        """Gives back the memory of what was read and of what came of it."""
        self._source.release()
        return_freed_memory()

    def _over_text(self, layer: int, rounder: LayerQuantizer) -> tuple[QuantizedLayer, States]:
        """Returns the quantized layer, and the next layer's input if there is one."""
        last = layer == len(self._layers) - 1
        kept = States(self._output.kept(layer), len(self._samples), len(self._samples[0]))
        states = kept.copy(self._output.work / "now")
        rest = [op for ops in self._layers[layer + 1 :] for op in ops]

        def after(done: int) -> set[str]:
            return live([*self._layers[layer][done:], *rest], {"x"})

        return rounder.quantize_with_text(states, after, last), states

    def _tensors(self, found: QuantizedLayer, names: list[str]) -> dict[str, PiecewiseTensor]:
        tensors: dict[str, PiecewiseTensor] = {}
        for name in names:
            if name not in found.rounded:
                changed = found.plain.get(name)
                tensors |= self._source.copied(name) if changed is None else self._plain(name, changed)
                continue
            parts = dict(zip(self._source.weights[name].sources, found.rounded[name], strict=True))
            tensors |= {at: whole(tensor) for at, tensor in self._written(parts, self._source.dtype(name)).items()}
        return tensors

    def _written(self, parts: dict[str, QuantizedWeight], dtype: torch.dtype) -> dict[str, Tensor]:
        """Returns the tensors of a weight whose sources are ``parts``, by their names in the files."""
        if self._recipe.takes_experts_only:
            return mxfp4.expert_tensors(parts)
        form, found = format_of(self._recipe), dict[str, Tensor]()
        for at, rounded in parts.items():
            base = (own_source(at) or at).removesuffix("weight")
            found |= {base + part: tensor for part, tensor in form.tensors(rounded, dtype).items()}
        return found

    def _kv_scales(self, found: QuantizedLayer, ops: Sequence[Op]) -> dict[str, PiecewiseTensor]:
        product = kv_product(ops)
        if not self._recipe.kv_cache_dtype or found.kv_peaks is None or product is None:
            return {}
        scales = kv_scales(found.kv_peaks, self._source.weights[product])
        return {name: whole(scale) for name, scale in scales.items()}

    def _plain(self, name: str, value: Tensor) -> dict[str, PiecewiseTensor]:
        """Returns ``value`` as the tensors that the source's files have of a weight, in their dtypes."""
        stored = self._source.stored(name)
        parts = value.split([len(part) for part in stored])
        found = [whole(part.to(old.dtype)) for part, old in zip(parts, stored, strict=True)]
        return dict(zip(self._source.weights[name].sources, found, strict=True))
