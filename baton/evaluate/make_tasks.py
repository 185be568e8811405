"""Writes this package's task sets: small sums, one-line functions to finish, and facts to copy out of a record.

Knows nothing of models.

    python -m baton.evaluate.make_tasks

All tasks are drawn with one seed, so the files are the same byte for byte each time. Each prompt begins with two
solved examples, because models without instruction tuning are evaluated too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import msgspec

from baton.evaluate.tasks_file import OWN, Task

COUNT, SHOWN, SEED = 60, 2, 20  # questions of a task, examples shown before them, and the seed that draws both
Pair = tuple[str, tuple[str, ...]]

FIRST = ("Ada", "Bruno", "Clara", "Dario", "Elif", "Femi", "Greta", "Hana", "Ivo", "Jonas", "Kira", "Luis")
LAST = ("Abel", "Bauer", "Costa", "Diaz", "Evers", "Fischer", "Gruber", "Hale", "Ito", "Jansen", "Keller", "Lund")
CITIES = ("Lisbon", "Oslo", "Vienna", "Prague", "Dublin", "Ghent", "Turin", "Riga", "Bergen", "Porto")
TRADES = ("baker", "carpenter", "doctor", "farmer", "gardener", "painter", "pilot", "sailor", "tailor", "teacher")
FIELDS = ("name", "city", "age", "trade")
SUMS = ("{a} + {b}", "{a} - {b}", "{a} * {b}")
VERBS = {
    "add_{n}": ("adds {n} to x", ("x + {n}", "{n} + x")),
    "take_{n}": ("takes {n} from x", ("x - {n}",)),
    "times_{n}": ("multiplies x by {n}", ("x * {n}", "{n} * x")),
    "is_above_{n}": ("says whether x is above {n}", ("x > {n}", "{n} < x")),
    "is_{n}": ("says whether x equals {n}", ("x == {n}", "{n} == x")),
    "remainder_{n}": ("gives the remainder of x divided by {n}", ("x % {n}",)),
}


def _sum(rng: random.Random) -> Pair:
    form = rng.choice(SUMS)
    low, high = (2, 10) if "*" in form else (10, 99)
    b, a = sorted(rng.randrange(low, high) for _ in "ab")
    result = {"+": a + b, "-": a - b, "*": a * b}[form[4]]
    return f"Question: What is {form.format(a=a, b=b)}?\nAnswer:", (str(result),)


def _function(rng: random.Random) -> Pair:
    name, (what, answers) = rng.choice(sorted(VERBS.items()))
    n = rng.randrange(2, 100)
    head = f'def {name.format(n=n)}(x):\n    """{what.capitalize().format(n=n)}."""\n    return'
    return head, tuple(answer.format(n=n) for answer in answers)


def _record(rng: random.Random) -> Pair:
    name, city = f"{rng.choice(FIRST)} {rng.choice(LAST)}", rng.choice(CITIES)
    values = {"name": name, "city": city, "age": str(rng.randrange(20, 80)), "trade": rng.choice(TRADES)}
    wanted = rng.choice(FIELDS)
    text = "{name}, aged {age}, works as a {trade} in {city}.".format(**values)
    return f"Text: {text}\n{wanted.capitalize()}:", (values[wanted],)


KINDS: dict[str, tuple[Callable[[random.Random], Pair], str]] = {
    "code": (_function, "\n\n"),
    "extraction": (_record, "\n\n"),
    "math": (_sum, "\n"),
}


def tasks(kind: str) -> list[Task]:
    """Returns the tasks of one kind ("code", "extraction" or "math"), all different from one another and from the
    examples.
    """
    make, between = KINDS[kind]
    rng = random.Random(f"{kind} {SEED}")
    drawn: dict[str, tuple[str, ...]] = {}
    while len(drawn) < COUNT + SHOWN:
        drawn |= [make(rng)]
    pairs = list(drawn.items())
    shown = "".join(f"{prompt} {answers[0]}{between}" for prompt, answers in pairs[:SHOWN])
    return [Task(shown + prompt, answers) for prompt, answers in pairs[SHOWN:]]


def write(folder: Path) -> None:
    """Writes a JSONL file of each kind to ``folder``, which is made if needed."""
    folder.mkdir(exist_ok=True)
    for kind in KINDS:
        lines = [msgspec.json.encode({"prompt": task.prompt, "answers": task.answers}) for task in tasks(kind)]
        (folder / f"{kind}.jsonl").write_bytes(b"\n".join(lines) + b"\n")


if __name__ == "__main__":
    write(OWN)
