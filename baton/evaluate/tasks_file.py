"""Reads tasks with known answers from JSONL files, with errors that name the line. Torch-free.

Knows nothing of models. A line is ``{"prompt": …, "answers": […]}``, with ``max_tokens`` (default 16) and ``stop``
(default a line's end) if they differ. The sets ``math``, ``code`` and ``extraction`` are in this package
(``make_tasks.py``).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from baton.protos.errors import ConfigError

OWN = Path(__file__).parent / "tasks"


class Task(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A prompt and the answers that count as right."""

    prompt: str
    answers: tuple[str, ...]
    max_tokens: int = 16  # of the model's answer
    stop: tuple[str, ...] = ("\n",)  # strings that end the model's answer

    def accepts(self, text: str) -> bool:
        """Returns whether ``text`` is one of the answers, apart from surrounding spaces."""
        return text.strip() in {answer.strip() for answer in self.answers}


def own_sets() -> tuple[str, ...]:
    """Returns the names of the task sets in this package."""
    return tuple(sorted(path.stem for path in OWN.glob("*.jsonl")))


def read_tasks(name: str) -> list[Task]:
    """Returns the tasks of the file ``name``, or of that set of ``own_sets``. Raises ConfigError naming file and
    line.
    """
    path = OWN / f"{name}.jsonl" if name in own_sets() else Path(name)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        choices = ", ".join(own_sets())
        raise ConfigError(f"--tasks {name}: {error.strerror}; give a file, or {choices}", "tasks") from error
    found = [_task(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise ConfigError(f"{path} holds no task", "tasks")
    return found


def _task(path: Path, number: int, line: bytes) -> Task:
    try:
        task = msgspec.json.decode(line, type=Task)
    except msgspec.MsgspecError as error:
        text = f'{path}, line {number}: {error}; a line is {{"prompt": "…", "answers": ["…"]}}'
        raise ConfigError(text, "tasks") from error
    if not task.prompt or not task.answers or task.max_tokens < 1:
        raise ConfigError(f"{path}, line {number}: needs a prompt, an answer and max_tokens above 0", "tasks")
    return task
