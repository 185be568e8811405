"""A profile folder's meta.yaml: whose operators were measured, on what, split over how many ranks.

Of the timings it only checks that reading the head's weights isn't faster than the memory. A meta.yaml lists all
``tp_degrees`` that were measured and names the widths of the last of them; the timings beside it are of one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from baton.planner.costs.data_sheets import accelerators
from baton.planner.costs.model_shape import ModelShape
from baton.protos.errors import ConfigError
from baton.protos.json import Json

YamlValue = Any  # whatever YAML holds
Yaml = dict[YamlValue, YamlValue]  # a mapping of the file, whose keys may be numbers
WIDTHS = ("intermediate_size", "num_attention_heads", "num_key_value_heads")
ABOVE_PEAK = 1.1  # of the data sheet's bandwidth: a timing says more only if it is of a smaller part


class ProfileMeta:
    """Reads the meta.yaml in ``home``, whose entries may be missing.

    Raises ConfigError if it is missing or malformed.
    """

    def __init__(self, home: Path) -> None:
        file = home / "meta.yaml"
        try:
            found = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"a profile needs {file}: {error}", "profile") from error
        if not isinstance(found, dict):
            raise ConfigError(f"{file} must be a mapping that names the model", "profile")
        self._file, self._home, self._found = file, home, Yaml(found)

    @property
    def model(self) -> str:
        """Returns the model's Hugging Face name; "" if it isn't given."""
        return str(self._found.get("model") or "")

    @property
    def degrees(self) -> list[int]:
        """Returns the tensor-parallel degrees that were measured."""
        found = self._found.get("tp_degrees") or []
        return [int(self._number("tp_degrees", d)) for d in (found if isinstance(found, list) else [found])]

    def degree_of_widths(self, shape: ModelShape) -> int | None:
        """Returns the tensor-parallel degree at which a rank of ``shape`` has the widths in meta.yaml; None if it
        names none.

        Raises ConfigError if they are another model's.
        """
        alone = self._overrides.get("num_key_value_heads") == 1  # more ranks than KV heads: each has a copy
        fields = [f for f in WIDTHS if f in self._overrides and not (alone and f == "num_key_value_heads")]
        found = {self._degree(field, shape) for field in fields}
        if len(found) > 1:
            raise ConfigError(f"{self._file}: its hf_overrides are not all split over as many ranks", "profile")
        return found.pop() if found else None

    def require_fit(self, shape: ModelShape, tp: int, head_s: float | None) -> None:
        """Raises ConfigError unless the timings can be those of one of ``tp`` ranks; ``head_s``: measured seconds
        of the logits for one sequence.
        """
        named = self.degree_of_widths(shape)
        if named == tp or (named is None and tp in (self.degrees or [tp])):
            return
        if (
            named is None
            or tp not in self.degrees
            or named not in self.degrees
            or self._too_quick(shape, tp, head_s)
        ):
            raise ConfigError(self._other(shape, tp), "profile")

    def skew(self, tp: int) -> float:
        """Returns the weight (0 to 1) of the longest context in attention over unequal contexts; 1 - it is the mean
        context's.
        """
        fits = self._section("skew_fit", "per_tp")
        fit = self._section("skew_fit", "per_tp", tp if tp in fits else str(tp))
        return self._number("alpha_default", fit.get("alpha_default") or 0.0)

    @property
    def _overrides(self) -> Json:
        return self._section("engine_effective", "hf_overrides")

    def _section(self, *names: object) -> Yaml:
        """Returns the section that lies under these names, one inside the other; empty if there is none."""
        found = self._found
        for name in names:
            found = found.get(name) or {}
            if not isinstance(found, dict):
                raise ConfigError(f"{self._file}: {name} must be a mapping", "profile")
        return found

    def _number(self, name: str, value: YamlValue) -> float:
        try:
            return float(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self._file}: {name}: {error}", "profile") from error

    def _degree(self, field: str, shape: ModelShape) -> int:
        measured, whole = int(self._number(field, self._overrides[field])), int(getattr(shape, field))
        if measured < 1 or whole % measured:
            text = f"measured with {field} {measured} per rank; {shape.name} has {whole}"
            raise ConfigError(f"{self._home}: {text}. Give the profile of this model", "profile")
        return whole // measured

    def _too_quick(self, shape: ModelShape, tp: int, head_s: float | None) -> bool:
        """Returns whether a rank of ``tp`` would have read its part of the head faster than its memory can."""
        sheet = accelerators().get(str(self._found.get("hardware", "")).lower())
        if sheet is None or not head_s:
            return False
        part = shape.vocab_size * shape.hidden_size * shape.bytes_per_value / tp
        return part / head_s > ABOVE_PEAK * sheet.memory_bytes_per_s

    def _other(self, shape: ModelShape, tp: int) -> str:
        field = next((f for f in WIDTHS if f in self._overrides), None)
        widths = f"measured with {field} {self._overrides[field]} per rank" if field else f"of {self.degrees} ranks"
        has = f"{getattr(shape, field) / tp:g}" if field else "another split"
        asked = f"{shape.name} on {tp} ranks has {has}"
        return f"{self._home}: {widths}; {asked}. Give the profile of this model and tensor parallelism"
