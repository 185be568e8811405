"""Finds the sites of a program, the places where an adapter may add to a layer's output.

Knows nothing of adapters' files. A site is a weight that rows are multiplied by, or an embedding table; a weight
stacked from several of the checkpoint's tensors is one site of several modules. A layer of experts has two sites,
each of all experts' modules, which PEFT also knows as the parameters ``gate_up_proj`` and ``down_proj`` of one
module.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

from baton.engine.program.ops import Adapt, Embedding, Linear, LmHead, Op
from baton.engine.program.program import Program, Weight

HEAD_MODULE = "lm_head"  # even if the head's weight is the embedding table
_EXPERT = re.compile(r"\.experts(\.|$)")
_STACK = re.compile(r"^(.+\.experts)[.\[]")


class Site(msgspec.Struct, frozen=True, array_like=True):
    """Locates one module of the checkpoint: it is outputs ``first`` … ``first + outputs - 1`` of site
    ``number``.
    """

    number: int
    first: int
    outputs: int
    inputs: int  # width of its input; of an embedding, the vocabulary's size
    looked_up: bool = False  # inputs are token ids
    gain: float = 1.0  # factor on its outputs


class StackedSite(msgspec.Struct, frozen=True, array_like=True):
    """Locates a parameter that holds all experts' matrices of a layer: expert e is outputs ``e * outputs`` … of
    site ``number``.
    """

    number: int
    experts: int
    outputs: int  # of one expert
    inputs: int
    woven: bool = False  # the parameter has gates and ups in turn; the site has an expert's gates first

    def site_of(self, expert: int) -> Site:
        """Returns the site of one expert's matrix."""
        return Site(self.number, expert * self.outputs, self.outputs, self.inputs)


def adaptable(program: Program) -> Program:
    """Returns the program with an ``Adapt`` op after each matrix product and embedding; the ops of the head and of
    experts apply adapters themselves.
    """
    return msgspec.structs.replace(program, ops=tuple(after for op in program.ops for after in _with_adapters(op)))


def head_site(program: Program) -> int:
    """Returns the number of the head's site, which comes after those of the program's ``Adapt`` ops."""
    return len(_adapts(program))


def expert_sites(program: Program) -> dict[str, int]:
    """Returns the numbers of the sites of experts' weights, by the weight's name; they come after the head's."""
    names = [name for op in program.experts for name in (op.gate_up, op.down)]
    return {name: number for number, name in enumerate(names, head_site(program) + 1)}


def site_count(program: Program) -> int:
    """Returns the number of sites of an adaptable program."""
    return head_site(program) + 1 + len(expert_sites(program))


def sites_of(program: Program) -> dict[str, Site]:
    """Returns the sites of an adaptable program by the checkpoint's module name, such as
    "model.layers.0.self_attn.q_proj". A head whose norm has a bias isn't one.
    """
    weights, adapts = {weight.name: weight for weight in program.weights}, enumerate(_adapts(program))
    gains = {op.weight: op.scale for op in program.ops if isinstance(op, Embedding)}
    found = dict(at for number, op in adapts for at in _modules(number, weights[op.weight], op.x is None, gains))
    for name, number in expert_sites(program).items():
        found |= _modules(number, weights[name], looked_up=False, gains=gains)
    head = _head(program)
    if head.norm_bias is not None:
        return found  # an adapter's product would need the norm's bias, which the head adds to logits alone
    rows, width = weights[head.weight].shapes[0]
    return found | {HEAD_MODULE: Site(head_site(program), 0, rows, width)}


def stacked_sites(program: Program) -> dict[str, StackedSite]:
    """Returns the sites of experts' parameters by transformers' names of them, such as
    "model.layers.0.mlp.experts.gate_up_proj".
    """
    numbers, weights, found = expert_sites(program), {weight.name: weight for weight in program.weights}, {}
    for op in program.experts:
        for name, parameter in ((op.gate_up, "gate_up_proj"), (op.down, "down_proj")):
            weight = weights[name]
            if (stack := _STACK.match(weight.sources[0])) is None:
                continue
            outputs = sum(shape[0] for shape in weight.shapes) // op.experts
            woven = weight.sources[0].endswith(",even]")
            site = StackedSite(numbers[name], op.experts, outputs, weight.shapes[0][1], woven)
            for module in (stack[1], stack[1].replace(".block_sparse_moe.", ".mlp.")):
                found[f"{module}.{parameter}"] = site
    return found


def others_of(program: Program) -> tuple[str, ...]:
    """Returns the checkpoint's modules of an adaptable program that are no sites, sorted."""
    sources = (source for weight in program.weights for source in weight.sources if source.endswith(".weight"))
    return tuple(sorted({source.removesuffix(".weight") for source in sources} - set(sites_of(program))))


def _adapts(program: Program) -> list[Adapt]:
    return [op for op in program.ops if isinstance(op, Adapt)]


def _head(program: Program) -> LmHead:
    return next(op for op in program.ops if isinstance(op, LmHead))


def _with_adapters(op: Op) -> tuple[Op, ...]:
    if isinstance(op, Linear):
        return op, Adapt(op.x, op.weight, op.out)
    return (op, Adapt(None, op.weight, op.out)) if isinstance(op, Embedding) else (op,)


def is_expert(module: str) -> bool:
    """Returns whether a module of a checkpoint is one expert's."""
    return _EXPERT.search(module) is not None


def _modules(number: int, weight: Weight, looked_up: bool, gains: dict[str, float]) -> Iterator[tuple[str, Site]]:
    first, gain = 0, gains[weight.name] if looked_up else 1.0
    for source, (rows, width) in zip(weight.sources, weight.shapes, strict=True):
        outputs, inputs = (width, rows) if looked_up else (rows, width)
        if not source.endswith("]"):  # stacked.py: a part of a tensor of all experts is no module
            yield source.removesuffix(".weight"), Site(number, first, outputs, inputs, looked_up, gain)
        first += rows
