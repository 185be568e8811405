"""Tells which parameter of all experts a pair of LoRA tensors stands beside, and how they hold its matrices.

Knows nothing of files' bytes. PEFT (``ParamWrapper``) names a pair by the module: the first parameter's is under
``<module>``, a second one's under ``<module>.base_layer``, in an order of its own, so that shapes decide. ``a`` has
the matrices of one expert after the other, (experts * rank, inputs); ``b`` has a column of each expert for each
rank, (outputs, rank * experts). Versions differ in which of the two stands beside the inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.peft_config import LoraSettings
from baton.engine.adapters.tensors import TensorEntry, TensorFile
from baton.engine.program.sites import StackedSite

PARAMETERS = ("gate_up_proj", "down_proj")


class TensorPair(NamedTuple):
    """The two LoRA tensors of one module."""

    a: TensorEntry
    b: TensorEntry


class Stack(msgspec.Struct, frozen=True):
    """A parameter of all experts beside which a pair stands."""

    parameter: str  # its name, such as "model.layers.0.mlp.experts.down_proj"
    site: StackedSite
    crossed: bool  # ``a`` stands beside the outputs and ``b`` beside the inputs


def parameters(module: str, base: AdapterBase) -> tuple[str, ...]:
    """Returns the names of the parameters of all experts that ``module``, as PEFT nests it, may stand beside."""
    while module.endswith(".base_layer"):
        module = module.removesuffix(".base_layer")
    return tuple(name for part in PARAMETERS if (name := f"{module}.{part}") in base.stacked)


def resolved(
    file: TensorFile, settings: LoraSettings, pairs: Mapping[str, TensorPair], base: AdapterBase
) -> dict[str, Stack]:
    """Returns the parameter of each module's pair. Raises AdapterRefused naming the tensor whose shape fits none,
    or fits several, or whose parameter another pair stands beside.
    """
    fits = {module: list(_fits(settings, module, pair, base)) for module, pair in pairs.items()}
    ways = {found[0].crossed for found in fits.values() if len(found) == 1}  # one version saved all of them
    stacks: dict[str, Stack] = {}
    taken: dict[str, str] = {}
    for module, pair in pairs.items():
        found = fits[module]
        if len(found) > 1 and len(ways) == 1:
            found = [stack for stack in found if stack.crossed in ways]
        stacks[module] = _only(file, settings, module, pair, found, base)
        other = taken.setdefault(stacks[module].parameter, pair.a.name)
        if other != pair.a.name:
            raise file.error(pair.a.name, f"is {stacks[module].parameter}'s, as {other} is; one of them is meant")
    return stacks


def _fits(settings: LoraSettings, module: str, pair: TensorPair, base: AdapterBase) -> Iterator[Stack]:
    for name in parameters(module, base):
        site = base.stacked[name]
        columns = site.experts * settings.rank_of(name)
        for crossed in (False, True):
            inputs, outputs = (site.outputs, site.inputs) if crossed else (site.inputs, site.outputs)
            if pair.a.shape == (columns, inputs) and pair.b.shape == (outputs, columns):
                yield Stack(name, site, crossed)


def _only(
    file: TensorFile, settings: LoraSettings, module: str, pair: TensorPair, found: list[Stack], base: AdapterBase
) -> Stack:
    if len(found) == 1:
        return found[0]
    if found:
        text = "is square for each expert, so that its inputs can't be told from its outputs"
        raise file.error(pair.a.name, f"{text}; target {' and '.join(PARAMETERS)} both, or each expert's layers")
    wanted = " or ".join(
        f"{(site.experts * settings.rank_of(name), site.inputs)} and "
        f"{(site.outputs, site.experts * settings.rank_of(name))} ({name.rpartition('.')[2]})"
        for name in parameters(module, base)
        for site in (base.stacked[name],)
    )
    shapes = f"{pair.a.shape} and its partner {pair.b.shape}"
    raise file.error(pair.a.name, f"has shape {shapes}; this model's experts and its rank ask for {wanted}")
