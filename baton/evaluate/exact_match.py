"""Counts the tasks whose accepted answer a subject gives word for word. Torch-free.

Knows nothing of models or files.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from baton.evaluate.figures import Figure
from baton.evaluate.intervals import mean_interval, share_interval
from baton.evaluate.subject import Subject
from baton.evaluate.tasks_file import Task


def task_results(subject: Subject, tasks: Sequence[Task]) -> list[bool]:
    """Returns, for each task, whether the subject's greedy answer is an accepted one."""
    found = [False] * len(tasks)
    for tokens, stop in sorted({(task.max_tokens, task.stop) for task in tasks}):
        places = [i for i, task in enumerate(tasks) if (task.max_tokens, task.stop) == (tokens, stop)]
        answers = subject.answers([subject.encode(tasks[i].prompt) for i in places], tokens, stop)
        for i, answer in zip(places, answers, strict=True):
            found[i] = tasks[i].accepts(answer.text)
    return found


def task_figures(name: str, found: Sequence[bool], reference: Sequence[bool] | None) -> Iterator[Figure]:
    """Yields the share of solved tasks; with ``reference`` (solved or not, by task), also its share and the
    difference.
    """
    yield _share(f"{name}: exact matches", found)
    if reference is None:
        return
    yield _share(f"{name}: exact matches of the reference", reference)
    lost = [float(r) - float(f) for r, f in zip(reference, found, strict=True)]
    yield Figure(f"{name}: lost", sum(lost) / len(lost), "share", *mean_interval(lost), len(lost), "tasks")


def _share(name: str, found: Sequence[bool]) -> Figure:
    return Figure(name, sum(found) / len(found), "share", *share_interval(sum(found), len(found)), len(found))
