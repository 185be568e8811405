"""Describes layers of experts in place of a decoder's MLP (https://arxiv.org/abs/2401.04088): which, how many, how
named.

Knows nothing of attention or of tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from baton.engine.program.config import ModelConfig
from baton.engine.program.ops import Linear, Moe, Op, Weight

MOST_CHOSEN, MOST_EXPERTS = 16, 512  # the most experts per token, and in all, that moe.h takes


class ExpertLayers(msgspec.Struct, frozen=True):
    """Holds which layers have experts (``layers``) and the names of their weights (``at``; ``parts``: gate,
    up, down).
    """

    layers: tuple[bool, ...]
    experts: int
    chosen: int
    inner: int
    renormalise: bool
    at: str
    parts: tuple[str, str, str]

    @classmethod
    def read(
        cls, config: ModelConfig, layers: tuple[bool, ...], experts: int, inner: int, renormalise: bool, at: str,
        parts: tuple[str, str, str],
    ) -> ExpertLayers:  # fmt: skip
        """Returns the layers with ``num_experts_per_tok`` of ``config``. Raises CheckpointError beyond what the
        kernel takes.
        """
        chosen = config.size("num_experts_per_tok")
        if experts > MOST_EXPERTS:
            raise config.error("num_experts", f"is {experts}; {MOST_EXPERTS} at most are known")
        if chosen > min(experts, MOST_CHOSEN):
            most = min(experts, MOST_CHOSEN)
            raise config.error("num_experts_per_tok", f"is {chosen}; {most} at most of {experts} experts")
        return cls(layers, experts, chosen, inner, renormalise, at, parts)

    def ops(self, layer: int) -> tuple[Op, ...]:
        """Returns the ops of ``layer`` from register ``h`` to ``down``."""
        gate_up, down = f"{layer}.experts_gate_up", f"{layer}.experts_down"
        return (
            Linear("h", f"{layer}.router", None, "router"),
            Moe("h", "router", gate_up, down, self.experts, self.chosen, self.renormalise, "down"),
        )

    def weights(self, layer: int, hidden: int) -> Iterator[Weight]:
        """Yields the router of ``layer`` and all experts' matrices, one behind the other."""
        at = f"model.layers.{layer}.{self.at}"
        gate, up, down = self.parts
        yield Weight(f"{layer}.router", (f"{at}.gate.weight",), ((self.experts, hidden),))
        pairs = tuple(f"{at}.experts.{e}.{part}.weight" for e in range(self.experts) for part in (gate, up))
        yield Weight(f"{layer}.experts_gate_up", pairs, ((self.inner, hidden),) * len(pairs))
        downs = tuple(f"{at}.experts.{e}.{down}.weight" for e in range(self.experts))
        yield Weight(f"{layer}.experts_down", downs, ((hidden, self.inner),) * len(downs))
