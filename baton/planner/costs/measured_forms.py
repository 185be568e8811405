"""Reads the JSON of ``baton evaluate --sweep``: loss and speed of each form of weights and KV on one machine.
Torch-free.

Knows nothing of models or accelerators. A form is the pair of [worker]'s ``quantization`` and ``kv_cache_dtype``;
for a quantized checkpoint it is ("checkpoint", KV).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from baton.protos.errors import ConfigError

Form = tuple[str, str]


class MeasuredForm(msgspec.Struct, frozen=True):
    """Holds one row of a sweep; speeds are in tokens/s.

    ``added`` is the loss added to the reference's, as a share of it, with its confidence interval ``low`` to
    ``high``.
    """

    scheme: str
    quantization: str
    kv_cache_dtype: str
    gigabytes: float  # of the weights
    decode_one: float  # output tokens/s of one sequence
    decode_many: float  # of a batch of 16
    prompt: float  # of prefill
    added: float
    low: float
    high: float
    activations: str = "auto"

    @property
    def form(self) -> Form:
        """Returns the form: (quantization, kv_cache_dtype)."""
        return self.quantization, self.kv_cache_dtype


class MeasuredForms:
    """Holds a sweep's rows, by form; those with activations of their own are left out."""

    def __init__(self, rows: Iterable[MeasuredForm]) -> None:
        self._rows: Mapping[Form, MeasuredForm] = {row.form: row for row in rows if row.activations == "auto"}

    @classmethod
    def read(cls, path: str) -> MeasuredForms:
        """Returns the sweep in the JSON file at ``path``. Raises ConfigError naming the file."""
        try:
            found = msgspec.json.decode(Path(path).read_bytes(), type=_Sweep)
        except (OSError, msgspec.MsgspecError) as error:
            text = f"{path} is no sweep ({error}); write one by baton evaluate MODEL --sweep --json {path}"
            raise ConfigError(text, "measured") from error
        return cls(found.rows)

    def of(self, settings: Mapping[str, str]) -> MeasuredForm | None:
        """Returns the row for [worker]'s ``settings``; None if that form wasn't measured."""
        return self._rows.get((settings.get("quantization", "none"), settings.get("kv_cache_dtype", "auto")))

    def refusal(self, settings: Mapping[str, str], most_loss: float) -> str:
        """Returns why a form loses more than ``most_loss`` (a share), or wasn't measured; "" if it may be used."""
        if not settings:
            return ""
        row = self.of(settings)
        said = ", ".join(f"{name}={value}" for name, value in settings.items())
        if row is None:
            return f"{said} was not measured"
        return f"{said} loses {row.added:.2%}, allowed are {most_loss:.2%}" if row.added > most_loss else ""


class _Sweep(msgspec.Struct, frozen=True):
    rows: tuple[MeasuredForm, ...]
