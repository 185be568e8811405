"""An exception at a chosen line: what is acquired before it must be given back.

``for fault in each_line("baton/decode_worker/engine/loop.py"): with fault: …; assert …`` goes through the lines of
these files in the order in which the block first reaches them, one run each, until a run ends without an exception.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

SURE = ("try:", "finally:", "with ExitStack() as undo:", "undo.", "return streams")  # none of them can fail


class Fault(RuntimeError):
    """The exception that is raised."""


class FaultAt:
    """Raises Fault at the ``number``-th line that is reached in ``files``; ``where`` names it afterwards."""

    def __init__(self, files: tuple[str, ...], number: int, but: tuple[str, ...]) -> None:
        self.where = ""
        self._files, self._left, self._but = files, number, but

    def __enter__(self) -> FaultAt:
        self._before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> bool:
        sys.settrace(self._before)
        return kind is Fault

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        return self._line if code.co_filename.endswith(self._files) and code.co_name not in self._but else None

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        if event != "line" or self.where or text.startswith(SURE):
            return self._line
        self._left -= 1
        if self._left < 0:
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}: {text}"
            raise Fault(f"injected at {self.where}")
        return self._line


def each_line(*files: str, but: tuple[str, ...] = ()) -> Iterator[FaultAt]:
    """Faults, one line later each time, until none was reached; none in the functions ``but``."""
    number = 0
    while True:
        yield (fault := FaultAt(files, number, but))
        if not fault.where:
            return
        number += 1
