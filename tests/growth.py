"""Finds the containers of a service that grow with the requests that it has served, by walking its attributes.

``grown`` runs the same round of requests again and again and names each container that every round left larger. A
cache that is bounded grows too until it is full: it is named by the test, with its bound.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import CellType, FunctionType, MethodType
from typing import Any

WALKED = ("baton.", "prometheus_client.")
PLAIN = (str, bytes, int, float, bool, type(None), memoryview, bytearray)
ROUNDS = 3


def sizes(roots: Mapping[str, object]) -> Counter[str]:
    """Elements of every container that can be reached, by the path of attributes to it; one path's together."""
    found: Counter[str] = Counter()
    for path, thing in reached(roots):
        if isinstance(thing, dict | list | set | deque) and getattr(thing, "maxlen", None) is None:
            found[path] += len(thing)
    return found


def reached(roots: Mapping[str, object]) -> Iterator[tuple[str, object]]:
    """Everything that attributes and containers lead to, each once, with the path to it."""
    seen: set[int] = set()
    ahead = deque(roots.items())
    while ahead:
        path, thing = ahead.popleft()
        if isinstance(thing, PLAIN) or id(thing) in seen:
            continue
        seen.add(id(thing))
        yield path, thing
        if isinstance(thing, dict | list | tuple | set | frozenset | deque):
            values = [*thing.values(), *thing.keys()] if isinstance(thing, dict) else list(thing)
            ahead.extend((f"{path}[]", value) for value in values)
        else:
            ahead.extend((f"{path}.{name}", value) for name, value in _parts(thing))


def _parts(thing: object) -> list[tuple[str, object]]:
    """Returns the objects that an object of ours leads to; a callback leads to what it is bound to."""
    if isinstance(thing, MethodType):
        return [("self", thing.__self__)]
    if isinstance(thing, functools.partial):
        return [("func", thing.func), ("args", thing.args), ("keywords", thing.keywords)]
    if isinstance(thing, FunctionType):
        return [("cell", content) for cell in thing.__closure__ or () for content in _content(cell)]
    kind = type(thing)
    if isinstance(thing, type | asyncio.Future) or not kind.__module__.startswith(WALKED):
        return []
    slots = [name for base in kind.__mro__ for name in _names(base)]
    return [*vars(thing).items()] if hasattr(thing, "__dict__") else [(n, getattr(thing, n, None)) for n in slots]


def _content(cell: CellType) -> list[object]:
    try:
        return [cell.cell_contents]
    except ValueError:  # not filled yet
        return []


def _names(base: type) -> tuple[str, ...]:
    names: Any = vars(base).get("__struct_fields__") or vars(base).get("__slots__", ())
    return (names,) if isinstance(names, str) else tuple(names) if isinstance(names, tuple | list) else ()


async def grown(
    roots: Callable[[], Mapping[str, object]],
    serve: Callable[[int], Awaitable[object]],
    bounds: Mapping[str, int],
    rounds: int = ROUNDS,
) -> dict[str, list[int]]:
    """Containers that each round but the first leaves larger, with their sizes; none of ``bounds``, unless over it.

    What grows in ``rounds`` is looked at for twice as many more: a few sizes that vary may rise by chance.

    ``serve(number)`` runs one round to its end. ``bounds``: the most that containers whose path ends so may hold.
    """
    seen: list[Counter[str]] = []
    found: dict[str, list[int]] = {}
    for number in range(3 * rounds):
        await serve(number)
        seen.append(sizes(roots()))
        growing = {path: [s[path] for s in seen] for path in seen[-1] if _rises([s[path] for s in seen])}
        found = {path: at for path, at in growing.items() if at[-1] > _bound(path, bounds)}
        if number + 1 >= rounds and not found:
            break
    return found


def _rises(counts: list[int]) -> bool:
    return all(later > earlier for earlier, later in itertools.pairwise(counts))


def _bound(path: str, bounds: Mapping[str, int]) -> int:
    return max((most for end, most in bounds.items() if path.endswith(end)), default=-1)
