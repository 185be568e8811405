"""The process that reads one adapter (reading.py): it answers through memory files and ends.

Knows nothing of the engine that started it, except that it ends with it.

    python -m baton.engine.adapters.reader_main ASK MEMORY ANSWER PARENT        three descriptors and a pid
"""

from __future__ import annotations

import mmap
import os
import resource
import sys

import msgspec

from baton.engine.adapters.reader import read_adapter
from baton.engine.adapters.reading import NICE, UP, ReadingAnswer, ReadingAsk
from baton.engine.child import die_with
from baton.protos.errors import BatonError, to_info

CPU_S = 60  # seconds; limited because a config's regular expressions aren't trusted
SPARE_BYTES = 1 << 30  # address space beyond four times the largest adapter


def main() -> int:
    """Reads the adapter that ASK describes, once stdin is closed; writes the result or error to ANSWER and returns
    0.
    """
    asked, memory, answer, parent = map(int, sys.argv[1:])
    die_with(parent)
    os.nice(max(0, NICE - os.getpriority(os.PRIO_PROCESS, 0)))
    os.write(answer, UP)
    sys.stdin.buffer.read()  # until it is closed: ASK is complete then
    ask = msgspec.json.decode(os.pread(asked, os.fstat(asked).st_size, 0), type=ReadingAsk)
    _bound(ask.base.max_bytes)
    os.write(answer, msgspec.json.encode(_answer(ask, memory)))
    return 0


def _answer(ask: ReadingAsk, memory: int) -> ReadingAnswer:
    def room(size: int) -> memoryview:
        os.ftruncate(memory, size)
        return memoryview(mmap.mmap(memory, size))

    try:
        content, _ = read_adapter(ask.source, ask.base, room)
        return ReadingAnswer(content)
    except BatonError as error:
        return ReadingAnswer(error=to_info(error))


def _bound(most: int) -> None:
    """Limits CPU time and address space; the kernel ends a reader that needs more than an adapter can."""
    for what, limit in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, 4 * most + SPARE_BYTES)):
        resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
