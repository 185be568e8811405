"""Checks that a name stands for no other adapter than operators were told. Knows nothing of files or workers."""

from __future__ import annotations

from collections.abc import Callable

LAG_S = 6.0  # seconds after which every router goes by a change, while nothing goes wrong
Served = str | None  # the id that a name stands for; None: it isn't served


class AdapterLedger:
    """Knows which content each name may stand for, by what operators were told; finds names that stand for others.

    ``unsure``: a fault may keep a router from hearing of changes, so that old contents count for ever.
    """

    def __init__(self, violated: Callable[[str], None], unsure: bool) -> None:
        self._violated, self._unsure = violated, unsure
        self._may: dict[str, list[tuple[float, frozenset[Served]]]] = {}
        self.of_request: dict[int, str] = {}  # the adapter that each request was asked on, by the request's number

    def begins(self, name: str, to: Served, now: float) -> None:
        """Notes that ``name`` may stand for ``to`` from now on, or still for what it did."""
        self._note(name, now, self._latest(name) | {to})

    def is_done(self, name: str, to: Served, now: float) -> None:
        """Notes that an operator was told that ``name`` stands for ``to``."""
        self._note(name, now, frozenset({to}))

    def resolved(self, number: int, name: str, to: Served, now: float) -> None:
        """Checks what a router took ``name`` for as request ``number`` came."""
        if to is not None:
            self.of_request[number] = to
        history = self._may.get(name, [(0.0, frozenset({None}))])
        ends = [at for at, _ in history[1:]] + [now]
        since = -1.0 if self._unsure else now - LAG_S
        allowed = frozenset().union(*(may for (_, may), end in zip(history, ends, strict=True) if end >= since))
        if to not in allowed | ({None} if self._unsure else set()):
            stands = ", ".join(sorted(map(str, allowed)))
            self._violated(f"request {number}: adapter {name} is taken for {to}, and stands for {stands}")

    def _latest(self, name: str) -> frozenset[Served]:
        return self._may[name][-1][1] if name in self._may else frozenset({None})

    def _note(self, name: str, now: float, may: frozenset[Served]) -> None:
        self._may.setdefault(name, [(0.0, frozenset({None}))]).append((now, may))
