"""Describes mixture-of-experts layers (https://arxiv.org/abs/2401.04088), which replace a decoder's MLP.

Knows nothing of attention or of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Combine, Linear, Moe, MoeGate, Op, Route, RouteTwo, ScaleRows, SwiGlu
from baton.engine.program.program import Weight

MOST_CHOSEN, MOST_EXPERTS = 16, 512  # the most experts per token, and in all, that moe.h takes


class Routing(msgspec.Struct, frozen=True):
    """Says how experts are chosen if not by a plain softmax; see ``ops.Route``."""

    scoring: str  # "softmax" or "sigmoid"
    groups: int = 1  # groups that experts are divided into
    kept: int = 1  # best groups that a row's experts are chosen from
    best: int = 1  # best experts whose scores' sum is a group's
    scale: float = 1.0  # factor on the mixed outputs
    biased: bool = False  # a bias is added to the scores for the choice
    bias_rows: int = 0  # 1: the checkpoint keeps it as a matrix of one row


class StackedNames(msgspec.Struct, frozen=True):
    """Names the tensors of a layer whose checkpoint stacks all experts' gates and ups in one tensor, and their
    downs in another.
    """

    router: str
    gate_up: str
    down: str
    shared: tuple[str, ...]  # gate and up of the shared expert, one tensor or two
    shared_down: str
    rows: bool = False  # matrices are stored with outputs first


class ExpertLayers(msgspec.Struct, frozen=True):
    """Describes which layers have experts, and the sizes and names of their weights.

    ``at`` and ``parts`` (gate, up, down) name the tensors if each expert has its own, ``names`` if tensors hold all
    experts. ``stacked``: tensors hold all experts with gate and up interleaved, with biases, also of the router;
    its two numbers are alpha and limit of ``MoeGate``.
    """

    layers: tuple[bool, ...]
    experts: int
    chosen: int  # experts per token
    inner: int  # width of an expert
    renormalise: bool  # the chosen experts' weights sum to 1
    at: str
    parts: tuple[str, str, str]
    routing: Routing | None = None  # None: a plain softmax
    shared: int = 0  # width of the experts that every row goes to; 0: none
    shared_at: str = ""  # the checkpoint's name of the shared experts' module
    shared_gate: bool = False  # a gate per row weighs the shared experts
    stacked: tuple[float, float] | None = None
    names: StackedNames | None = None
    scaled: bool = False  # an expert's input, not its output, is multiplied by its score
    jitter: float | None = None  # two experts are chosen by SparseMixer, with this number (``ops.RouteTwo``)

    @classmethod
    def read(
        cls, config: ModelConfig, layers: tuple[bool, ...], experts: int, inner: int, renormalise: bool, at: str,
        parts: tuple[str, str, str], routing: Routing | None = None, shared: int = 0, shared_at: str = "",
        shared_gate: bool = False,
    ) -> ExpertLayers:  # fmt: skip
        """Returns the description with ``num_experts_per_tok`` of ``config``. Raises CheckpointError beyond the
        kernel's limits.
        """
        chosen = config.size("num_experts_per_tok")
        if experts > MOST_EXPERTS:
            raise config.error("num_experts", f"is {experts}; {MOST_EXPERTS} at most are known")
        if chosen > min(experts, MOST_CHOSEN):
            most = min(experts, MOST_CHOSEN)
            raise config.error("num_experts_per_tok", f"is {chosen}; {most} at most of {experts} experts")
        own = routing, shared, shared_at, shared_gate
        return cls(layers, experts, chosen, inner, renormalise, at, parts, *own)

    def ops(self, layer: int) -> tuple[Op, ...]:
        """Returns the ops of ``layer``, which read register ``h`` and write ``down``."""
        if self.jitter is not None:
            return self._mixed_two(layer, self.jitter)
        route, gate = self._route(layer), self._gate(layer)
        logits, factor = ("routed", "factor") if route else ("router", None)
        weights, mixed = (f"{layer}.experts_gate_up", f"{layer}.experts_down"), "mixed" if self.shared else "down"
        renormalise = self.renormalise if self.routing is None else True
        x = "scaled" if self.scaled else "h"
        return (
            Linear("h", f"{layer}.router", f"{layer}.router_bias" if gate else None, "router"),
            *route,
            *((ScaleRows("h", "factor", x),) if self.scaled else ()),
            Moe(x, logits, *weights, self.experts, self.chosen, renormalise, mixed, gate),
            *(self._shared(layer, None if self.scaled else factor) if self.shared else ()),
        )

    def _mixed_two(self, layer: int, jitter: float) -> tuple[Op, ...]:
        weights = f"{layer}.experts_gate_up", f"{layer}.experts_down"
        return (
            Linear("h", f"{layer}.router", None, "router"),
            RouteTwo("router", self.experts, jitter, "routed", "factor"),
            Moe("h", "routed", *weights, self.experts, self.chosen, True, "mixed"),
            ScaleRows("mixed", "factor", "down"),
        )

    def _route(self, layer: int) -> tuple[Op, ...]:
        if (of := self.routing) is None:
            return ()
        bias = f"{layer}.router_bias" if of.biased else None
        among = self.experts, self.chosen, of.groups, of.kept, of.best
        return (Route("router", bias, of.scoring, *among, self.renormalise, of.scale, "routed", "factor"),)

    def _shared(self, layer: int, factor: str | None) -> tuple[Op, ...]:
        gate = (Linear("h", f"{layer}.shared_gate", None, "shared_gate"),) if self.shared_gate else ()
        return (
            *gate,
            Linear("h", f"{layer}.shared_gate_up", None, "shared_gate_up"),
            SwiGlu("shared_gate_up", "shared_g"),
            Linear("shared_g", f"{layer}.shared_down", None, "shared"),
            Combine("mixed", factor, "shared", "shared_gate" if gate else None, "down"),
        )

    def _gate(self, layer: int) -> MoeGate | None:
        if self.stacked is None:
            return None
        return MoeGate(f"{layer}.experts_gate_up_bias", f"{layer}.experts_down_bias", *self.stacked)

    def weights(self, layer: int, hidden: int) -> Iterator[Weight]:
        """Yields the weights of ``layer``: the router, and all experts' matrices stacked; ``hidden`` is the model's
        width.
        """
        at = f"model.layers.{layer}.{self.at}"
        if self.stacked is not None:
            yield from self._stacked_weights(layer, at, hidden)
            return
        if self.names is not None:
            yield from self._named_weights(layer, f"model.layers.{layer}.", self.names, hidden)
            return
        gate, up, down = self.parts
        yield Weight(f"{layer}.router", (f"{at}.gate.weight",), ((self.experts, hidden),))
        pairs = tuple(f"{at}.experts.{e}.{part}.weight" for e in range(self.experts) for part in (gate, up))
        yield Weight(f"{layer}.experts_gate_up", pairs, ((self.inner, hidden),) * len(pairs))
        downs = tuple(f"{at}.experts.{e}.{down}.weight" for e in range(self.experts))
        yield Weight(f"{layer}.experts_down", downs, ((hidden, self.inner),) * len(downs))
        if self.routing is not None and self.routing.biased:
            shape = (1,) * self.routing.bias_rows + (self.experts,)
            yield Weight(f"{layer}.router_bias", (f"{at}.gate.e_score_correction_bias",), (shape,), exact=True)
        if self.shared:
            yield from self._shared_weights(layer, f"{at}.{self.shared_at}", hidden)
        if self.shared_gate:
            yield Weight(f"{layer}.shared_gate", (f"{at}.{self.shared_at}_gate.weight",), ((1, hidden),))

    def _shared_weights(self, layer: int, at: str, hidden: int) -> Iterator[Weight]:
        pair = f"{at}.gate_proj.weight", f"{at}.up_proj.weight"
        yield Weight(f"{layer}.shared_gate_up", pair, ((self.shared, hidden),) * 2)
        yield Weight(f"{layer}.shared_down", (f"{at}.down_proj.weight",), ((hidden, self.shared),))

    def _named_weights(self, layer: int, at: str, names: StackedNames, hidden: int) -> Iterator[Weight]:
        end = ",rows" if names.rows else ""
        yield Weight(f"{layer}.router", (f"{at}{names.router}.weight",), ((self.experts, hidden),))
        pairs = tuple(
            f"{at}{names.gate_up}[{e},{half}{end}]" for e in range(self.experts) for half in ("first", "last")
        )
        yield Weight(f"{layer}.experts_gate_up", pairs, ((self.inner, hidden),) * len(pairs))
        downs = tuple(f"{at}{names.down}[{e}{end}]" for e in range(self.experts))
        yield Weight(f"{layer}.experts_down", downs, ((hidden, self.inner),) * len(downs))
        both = tuple(f"{at}{name}.weight" for name in names.shared)
        rows = 2 * self.shared // len(both)
        yield Weight(f"{layer}.shared_gate_up", both, ((rows, hidden),) * len(both))
        yield Weight(f"{layer}.shared_down", (f"{at}{names.shared_down}.weight",), ((hidden, self.shared),))
        if self.shared_gate:
            yield Weight(f"{layer}.shared_gate", (f"{at}{self.at}.{self.shared_at}_gate.weight",), ((1, hidden),))

    def _stacked_weights(self, layer: int, at: str, hidden: int) -> Iterator[Weight]:
        yield Weight(f"{layer}.router", (f"{at}.router.weight",), ((self.experts, hidden),))
        yield Weight(f"{layer}.router_bias", (f"{at}.router.bias",), ((self.experts,),))
        for end, inputs in (("", (hidden,)), ("_bias", ())):
            name = f"{at}.experts.gate_up_proj{end}"
            pairs = tuple(f"{name}[{e},{half}]" for e in range(self.experts) for half in ("even", "odd"))
            yield Weight(f"{layer}.experts_gate_up{end}", pairs, ((self.inner, *inputs),) * len(pairs))
        for end, inputs in (("", (self.inner,)), ("_bias", ())):
            downs = tuple(f"{at}.experts.down_proj{end}[{e}]" for e in range(self.experts))
            yield Weight(f"{layer}.experts_down{end}", downs, ((hidden, *inputs),) * len(downs))
