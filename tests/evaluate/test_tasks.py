"""Tests task sets: those of the package are as drawn, a bad line is named, and answers count word for word."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.evaluate import make_tasks
from baton.evaluate.exact_match import task_figures, task_results
from baton.evaluate.local import LocalSubject
from baton.evaluate.tasks_file import OWN, Task, own_sets, read_tasks
from baton.protos.errors import ConfigError


def test_the_packages_sets_are_what_their_seed_draws(tmp_path: Path) -> None:
    make_tasks.write(tmp_path)
    assert own_sets() == ("code", "extraction", "math")
    for name in own_sets():
        assert (tmp_path / f"{name}.jsonl").read_bytes() == (OWN / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize("name", ["code", "extraction", "math"])
def test_each_task_is_there_once_and_not_among_its_own_examples(name: str) -> None:
    tasks = read_tasks(name)
    assert len({task.prompt for task in tasks}) == len(tasks) == make_tasks.COUNT
    endings = [task.prompt.rsplit("\n\n" if name != "math" else "\nQuestion", 1) for task in tasks]
    assert all(ending not in shown for shown, ending in endings)


def test_the_sums_are_right() -> None:
    for task in read_tasks("math"):
        a, sign, b = task.prompt.rsplit("What is ", 1)[1].split("?")[0].split()
        assert task.accepts(str({"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[sign]))


BAD = [
    "{",
    '{"prompt": "a"}',
    '{"prompt": "", "answers": ["b"]}',
    '{"prompt": "a", "answers": []}',
    '{"prompt": 1, "answers": ["b"]}',
    '{"prompt": "a", "answers": ["b"], "anwser": "c"}',
]


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_refused_by_its_number(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a", "answers": ["b"]}\n\n' + line + "\n")
    with pytest.raises(ConfigError, match=r"tasks.jsonl, line 3"):
        read_tasks(str(path))


def test_a_file_that_is_not_there_is_refused_with_the_packages_sets(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="code, extraction, math"):
        read_tasks(str(tmp_path / "none.jsonl"))


def test_a_models_own_answers_are_exact_matches_and_others_are_not(local: LocalSubject) -> None:
    text = local.answers([local.encode("river")], 4)[0].text
    right, wrong = Task("river", (text + "!", text), 4, ()), Task("river", ("no such answer",), 4, ())
    assert task_results(local, [wrong, right]) == [False, True]
    share, reference, lost = task_figures("own", [False, True], [True, True])
    assert (share.value, reference.value, lost.value) == (0.5, 1.0, 0.5)
    assert lost.judged == "tasks"
