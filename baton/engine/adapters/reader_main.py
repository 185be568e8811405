"""The process that reads adapters (``reading.py``): it forks a child per adapter, which answers through memory
files.

Knows nothing of the engine that started it, except that it ends with it. One adapter is read at a time.

    python -m baton.engine.adapters.reader_main SOCKET BASE PARENT        two descriptors and a pid
"""

from __future__ import annotations

import mmap
import os
import resource
import socket
import sys
import traceback

import msgspec

from baton.engine.adapters.base import AdapterBase
from baton.engine.adapters.pace import Pace
from baton.engine.adapters.reader import read_adapter
from baton.engine.adapters.reading import FREE, NICE, ReadingAnswer, append
from baton.engine.child import die_with
from baton.protos.channel import AdapterPlace
from baton.protos.errors import BatonError, to_info

PACKET_BYTES = 1 << 16  # of one AdapterPlace: paths have 4096 bytes at most
CPU_S = 60  # seconds; limited because a config's regular expressions aren't trusted
SPARE_BYTES = 1 << 30  # address space beyond four times the largest adapter


def main() -> int:
    """Reads the adapters that SOCKET asks for, until its peer closes it; returns 0."""
    fd, file, parent = map(int, sys.argv[1:])
    die_with(parent)
    base = msgspec.json.decode(os.pread(file, os.fstat(file).st_size, 0), type=AdapterBase)
    os.nice(max(0, NICE - os.getpriority(os.PRIO_PROCESS, 0)))
    with socket.socket(fileno=fd) as sock:
        while (asked := socket.recv_fds(sock, PACKET_BYTES, 2))[0]:
            packet, files, _, _ = asked
            if packet == FREE:
                os.close(files[0])
            else:
                sock.send(str(_forked(packet, base, *files)).encode())
    return 0


def _forked(packet: bytes, base: AdapterBase, memory: int, answer: int) -> int:
    """Returns the status of a child that has read an adapter: 0, or minus the signal that ended it."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_child(packet, base, memory, answer, parent)
    os.close(memory)
    os.close(answer)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _be_child(packet: bytes, base: AdapterBase, memory: int, answer: int, parent: int) -> None:
    status = 1
    try:
        die_with(parent)
        _bound(base.max_bytes)
        source = msgspec.json.decode(packet, type=AdapterPlace)
        os.write(answer, msgspec.json.encode(_answer(source, base, memory)))
        status = 0
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


def _answer(source: AdapterPlace, base: AdapterBase, memory: int) -> ReadingAnswer:
    pace = Pace()

    def room(size: int, tensors: int) -> memoryview:
        pace.expect(size, tensors)
        os.ftruncate(memory, size)
        return memoryview(mmap.mmap(memory, size))

    try:
        content, matrices = read_adapter(source, base, room, pace)
        append(memory, len(matrices), content.parts)
        return ReadingAnswer(content.info)
    except BatonError as error:
        return ReadingAnswer(error=to_info(error))


def _bound(most: int) -> None:
    """Limits CPU time and address space; the kernel ends a reader that needs more than an adapter can."""
    for what, limit in ((resource.RLIMIT_CPU, CPU_S), (resource.RLIMIT_AS, 4 * most + SPARE_BYTES)):
        resource.setrlimit(what, (limit, limit))


if __name__ == "__main__":
    sys.exit(main())
