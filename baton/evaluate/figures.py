"""Results of an evaluation: figures with their intervals, and whether each is within its tolerance. Torch-free.

Knows nothing of how they were measured or how they are shown.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from baton.protos.errors import ConfigError

# What a tolerance can be set for, and what the number means.
JUDGED = {
    "loss": "bits per byte added to the reference's, as a share",
    "kl": "nats per token between the reference's and the subject's likelihoods",
    "disagreement": "share of the reference's tokens that aren't the subject's likeliest",
    "divergence": "share of the reference's answers that the subject doesn't repeat",
    "needle": "share of needles that the reference finds and the subject loses, net",
    "tasks": "share of tasks that the reference solves and the subject doesn't, net",
}
PLAIN = "loss"  # what a tolerance without a name is for

# The part of an evaluation that measures what a tolerance is for, where it isn't named the same.
PARTS_OF = dict.fromkeys(("kl", "disagreement", "divergence"), "paths")


class Figure(msgspec.Struct, frozen=True):
    """One figure of an evaluation, which a tolerance may apply to."""

    name: str
    value: float
    unit: str
    low: float  # ``low`` to ``high`` holds the true value in 95 of 100 samples
    high: float
    count: int  # measured items, such as documents, tokens or tasks
    judged: str = ""  # name of the tolerance that applies to it; "" for none
    tolerance: float | None = None  # largest allowed ``value``

    @property
    def passes(self) -> bool | None:
        """Returns whether the figure is within its tolerance; None without one."""
        return None if self.tolerance is None else self.value <= self.tolerance

    @property
    def is_sure(self) -> bool:
        """Returns whether the whole interval is on the same side of the tolerance; True without one."""
        return self.tolerance is None or not self.low <= self.tolerance < self.high


def tolerances(texts: Iterable[str]) -> dict[str, float]:
    """Returns tolerances such as ``loss=1%`` or ``kl=0.02`` as numbers by name; a bare number is that of the loss.

    Raises ConfigError for unknown names and for what is no number.
    """
    return dict(map(_tolerance, texts))


def _tolerance(text: str) -> tuple[str, float]:
    name, equals, number = text.rpartition("=")
    name = name if equals else PLAIN
    if name not in JUDGED:
        raise ConfigError(f"--fail-above {text!r}: {name!r} is unknown; use {', '.join(JUDGED)}", "fail_above")
    try:
        value = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        raise ConfigError(
            f"--fail-above {text!r}: {number!r} is no number; write 0.01 or 1%", "fail_above"
        ) from None
    if not value >= 0:
        raise ConfigError(f"--fail-above {text!r}: must not be below 0", "fail_above")
    return name, value


def require_measured(allowed: Iterable[str], parts: Sequence[str], has_reference: bool) -> None:
    """Raises ConfigError for a tolerance in ``allowed`` that ``parts`` don't measure, and where there is no
    reference.
    """
    for name in allowed:
        if not has_reference:
            text = f"--fail-above {name} is the most that may differ from a reference: it needs --against"
            raise ConfigError(text, "fail_above")
        if (part := PARTS_OF.get(name, name)) not in parts:
            raise ConfigError(f"--fail-above {name} needs the part {part} in --only", "fail_above")


def judged(figures: Sequence[Figure], allowed: dict[str, float]) -> list[Figure]:
    """Returns the figures with the tolerances in ``allowed``. Raises ConfigError for a tolerance of an unmeasured
    figure.
    """
    measured = {figure.judged for figure in figures}
    if missing := [name for name in allowed if name not in measured]:
        text = f"--fail-above {missing[0]} was asked for, and none of it fits the models' contexts"
        raise ConfigError(text, "fail_above")
    return [
        msgspec.structs.replace(figure, tolerance=allowed[figure.judged]) if figure.judged in allowed else figure
        for figure in figures
    ]


def passes(figures: Sequence[Figure]) -> bool:
    """Returns whether no figure is above its tolerance."""
    return all(figure.passes is not False for figure in figures)
