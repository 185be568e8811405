"""Chooses the scheme that each weight is quantized to on load: one for all layers, others for layers that patterns
name.

Knows nothing of tensors or of how a scheme rounds. Layers are named by the checkpoint's modules, such as
``model.layers.0.mlp.down_proj``, and the head is ``lm_head``, tied or not. A pattern is a shell's (``*``, ``?``),
or a regular expression after ``re:`` as in compressed-tensors. It must match a whole name; the first match decides.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import translate

from baton.engine.program.program import Weight
from baton.engine.program.stacked import part_of
from baton.engine.quant import NONE, on_load
from baton.protos.errors import ConfigError

FIELD = "quantization_overrides"
HEAD_MODULE = "lm_head"


class LayerSchemes:
    """Holds the scheme of all layers, and ``overrides`` by pattern. Raises ConfigError for an unknown scheme or an
    invalid pattern.

    ``head`` is the name of the head's weight; ``may_miss`` allows patterns that match no layer, because they were
    written for another model.
    """

    def __init__(self, scheme: str, overrides: Mapping[str, str], head: str, may_miss: bool = False) -> None:
        self._scheme, self._head, self._may_miss = scheme, head, may_miss
        self._rules = [(pattern, _compiled(pattern), name) for pattern, name in overrides.items()]
        self._matched: set[str] = set()
        for name in {scheme, *overrides.values()} - {NONE}:
            on_load(name)

    def of(self, weight: Weight) -> str:
        """Returns a weight's scheme, "none" to leave it as stored. Raises ConfigError if modules that are stacked
        in it have different schemes.
        """
        modules = [HEAD_MODULE] if weight.name == self._head else list(dict.fromkeys(map(_module, weight.sources)))
        found = {module: self._of_module(module) for module in modules}
        if len(set(found.values())) > 1:
            first, other = next((a, b) for a in found for b in found if found[a] != found[b])
            text = (
                f"{first} is to be {found[first]} and {other} {found[other]}, but both are multiplied as one weight"
            )
            raise ConfigError(f"{FIELD}: {text}; name them alike", FIELD)
        return found[modules[0]]

    def require_used(self, weights: Iterable[Weight]) -> None:
        """Raises ConfigError for a pattern that matched no weight passed to ``of``, unless ``may_miss``;
        ``weights`` gives an example of names.
        """
        names = [module for weight in weights for module in map(_module, weight.sources)]
        if self._may_miss:
            return
        unused = next((pattern for pattern, _, _ in self._rules if pattern not in self._matched), None)
        if unused is not None:
            text = f"{unused!r} names no layer that is rounded; layers are named as {names[0] if names else 'none'}"
            raise ConfigError(f"{FIELD}: {text}", FIELD)

    def _of_module(self, module: str) -> str:
        hits = [(pattern, name) for pattern, compiled, name in self._rules if compiled.fullmatch(module)]
        self._matched |= {pattern for pattern, _ in hits}
        return hits[0][1] if hits else self._scheme


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern[3:] if pattern.startswith("re:") else translate(pattern))
    except re.error as error:
        raise ConfigError(f"{FIELD}: {pattern!r} is no regular expression: {error}", FIELD) from None


def _module(source: str) -> str:
    return part_of(source)[0].removesuffix(".weight")
