"""Runs the requested parts of an evaluation, on a subject alone or beside a reference. Torch-free.

Knows nothing of flags or of what stands behind a subject.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import msgspec

from baton.evaluate.exact_match import task_figures, task_results
from baton.evaluate.figures import Figure
from baton.evaluate.loss import bits, loss_figures
from baton.evaluate.needle import NeedleResult, answer_needles, needle_figures, needles
from baton.evaluate.paths import GreedyAnswer, greedy_answers, opening_prompts, path_figures
from baton.evaluate.subject import Subject
from baton.evaluate.tasks_file import Task
from baton.evaluate.text import WINDOW, cut
from baton.protos.errors import ConfigError

PARTS = ("loss", "paths", "needle", "tasks")
NEEDLES = (256, 512, 1024)  # tokens of the texts that hide one, unless told
Say = Callable[[str], None]


class Questions(msgspec.Struct, frozen=True):
    """The parts of an evaluation and their inputs; lengths are in tokens."""

    texts: tuple[str, ...] = ()  # documents
    tasks: dict[str, tuple[Task, ...]] = {}  # by the name of their set
    parts: tuple[str, ...] = PARTS
    prompts: int = 32  # number of prompts for the part "paths"
    prompt_tokens: int = 64
    answer_tokens: int = 64
    needle_lengths: tuple[int, ...] = ()  # () for those of NEEDLES that fit
    window: int = WINDOW  # of a document's loss


def evaluate(
    asked: Questions, subject: Subject, reference: Subject | None, say: Say = lambda _: None
) -> list[Figure]:
    """Returns the figures of every part of ``asked``, in order; progress is passed to ``say``.

    Without a ``reference``, parts and figures that compare are left out. Raises ConfigError for needles whose
    length was asked for and doesn't fit.
    """
    if "needle" in asked.parts:
        _require_fitting(asked.needle_lengths, subject, reference)
    return [figure for part in asked.parts for figure in _PARTS[part](asked, subject, reference, say)]


def _require_fitting(lengths: Sequence[int], subject: Subject, reference: Subject | None) -> None:
    room = min(side.context for side in (subject, reference) if side is not None)
    if long := [length for length in lengths if length > room]:
        raise ConfigError(f"--needle {long[0]}: the context has room for {room} tokens", "needle")


def _loss(asked: Questions, subject: Subject, reference: Subject | None, say: Say) -> Iterator[Figure]:
    longest = min(asked.window, subject.context, *([reference.context] if reference else []))
    documents = cut(list(asked.texts), subject.encode, longest)
    say(f"{subject.name}: loss on {len(documents)} documents")
    found = bits(subject, documents)
    if reference is None:
        yield from loss_figures(documents, found, None)
        return
    say(f"{reference.name}: loss on {len(documents)} documents")
    known = bits(reference, cut(list(asked.texts), reference.encode, longest))
    yield from loss_figures(documents, found, known)


def _paths(asked: Questions, subject: Subject, reference: Subject | None, say: Say) -> Iterator[Figure]:
    if reference is None:
        return
    tokens = [reference.encode(text) for text in asked.texts]
    prompts = opening_prompts(tokens, asked.prompts, asked.prompt_tokens)
    say(f"{reference.name}: {len(prompts)} greedy answers of {asked.answer_tokens} tokens")
    paths: list[GreedyAnswer] = greedy_answers(reference, prompts, asked.answer_tokens)
    say(f"{subject.name}: along {len(paths)} greedy answers of the reference")
    yield from path_figures(subject, reference, paths)


def _needle(asked: Questions, subject: Subject, reference: Subject | None, say: Say) -> Iterator[Figure]:
    room = subject.context if reference is None else min(subject.context, reference.context)
    lengths = [length for length in asked.needle_lengths or NEEDLES if length <= room]
    hidden = needles(subject, asked.texts, lengths)
    if not hidden:
        return
    say(f"{subject.name}: {len(hidden)} needles")
    found = answer_needles(subject, hidden)
    known: list[NeedleResult] | None = None
    if reference is not None:
        say(f"{reference.name}: {len(hidden)} needles")
        known = answer_needles(reference, hidden)
    yield from needle_figures(hidden, found, known)


def _tasks(asked: Questions, subject: Subject, reference: Subject | None, say: Say) -> Iterator[Figure]:
    for name, tasks in asked.tasks.items():
        say(f"{subject.name}: {len(tasks)} tasks of {name}")
        found = task_results(subject, tasks)
        known: Sequence[bool] | None = None if reference is None else task_results(reference, tasks)
        yield from task_figures(name, found, known)


_PARTS: dict[str, Callable[[Questions, Subject, Subject | None, Say], Iterator[Figure]]] = {
    "loss": _loss,
    "paths": _paths,
    "needle": _needle,
    "tasks": _tasks,
}
