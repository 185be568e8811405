"""Engines of one machine lend one another cores by a shared page: in real processes, whatever becomes of them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from baton.kernels.abi import cores, native
from baton.kernels.linear.packed import PackedWeight, quantize
from baton.kernels.registry import implementation

pytestmark = pytest.mark.skipif(native.library() is None, reason="no compiler here")
forked = multiprocessing.get_context("fork")
GENEROUS_S = 90.0  # for what takes a fifth of a second on a quiet machine


class Engine:
    """A process with the native library that shares ``page``; ``ask`` returns what it says."""

    def __init__(self, page: str, share: int, every: int, role: str = "prefill") -> None:
        _sample()  # made here, because a fork of a process in which torch has threads can't start any
        self._pipe, theirs = forked.Pipe()
        self.process = forked.Process(target=_serve, args=(theirs, page, share, every, role), daemon=True)
        self.process.start()
        assert self._pipe.recv() == "seated"  # seats are taken in the order of their making

    def ask(self, what: str, *arguments: Any) -> Any:
        self._pipe.send((what, *arguments))
        return self._pipe.recv()

    @property
    def cores(self) -> int:
        """Returns how many cores an op of the process may use now; asking makes it busy."""
        return int(self.ask("cores"))

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self._pipe.close()


def _serve(pipe: Connection, page: str, share: int, every: int, role: str) -> None:
    lent = cores.lend(page, share, every)
    lent.begin_role(role)
    pipe.send("seated")
    does: dict[str, Callable[..., Any]] = {
        "cores": cores.usable,
        "rest": lent.rest,
        "role": lent.begin_role,
        "prompts_beside": lent.prompts_beside,
        "tell_chunk": lent.tell_chunk,
        "agrees": _agrees,
        "work": lambda: [_linear(*_sample()) for _ in itertools.count()],
    }
    with contextlib.suppress(EOFError):
        while True:
            what, *arguments = pipe.recv()
            pipe.send(does[what](*arguments))


@functools.cache
def _sample() -> tuple[PackedWeight, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return quantize(torch.randn(512, 256, generator=generator), 8, 0), torch.randn(96, 256, generator=generator)


def _linear(weight: PackedWeight, rows: torch.Tensor) -> bytes:
    return bytes(implementation("linear", "cpu")(rows, weight).numpy().tobytes())


def _agrees(wanted: bytes, times: int) -> bool:
    sample = _sample()
    return all(_linear(*sample) == wanted for _ in range(times))


@pytest.fixture
def page() -> Iterator[str]:
    fd = cores.new_page()
    yield f"/proc/{os.getpid()}/fd/{fd}"
    os.close(fd)


@pytest.fixture
def engine(page: str) -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:

        def start(share: int, every: int, role: str = "prefill") -> Engine:
            made = Engine(page, share, every, role)
            stack.callback(made.close)
            return made

        yield start


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def settles(engines: list[Engine], wanted: list[int]) -> None:
    """Waits until all compute at once and have so many cores.

    All are asked before one answers, because who is silent for half a second is put aside.
    """

    def shared() -> list[int]:
        for one in engines:
            one._pipe.send(("cores",))
        return [int(one._pipe.recv()) for one in engines]

    until(lambda: shared() == wanted, f"they share as {wanted}")


def test_who_computes_alone_has_every_core_and_beside_others_its_own(engine: Callable[..., Engine]) -> None:
    first, second = engine(2, 4), engine(2, 4, "decode")
    assert first.cores == 4
    settles([first, second], [2, 2])
    second.ask("rest")
    assert first.cores == 4


@pytest.mark.parametrize(("shares", "every"), [((1, 1), 3), ((2, 2, 2), 8), ((1, 1, 1), 2), ((1, 2, 3), 10)])
def test_busy_engines_divide_every_core_and_what_is_left_over_goes_to_those_that_decode(
    engine: Callable[..., Engine], shares: tuple[int, ...], every: int
) -> None:
    engines = [engine(share, every) for share in shares]
    engines[-1].ask("role", "decode")
    each, over = divmod(max(0, every - sum(shares)), len(shares))
    first = [len(shares) - 1, *range(len(shares) - 1)][:over]  # who decodes, then by seat
    wanted = [share + each + (at in first) for at, share in enumerate(shares)]
    assert sum(wanted) == max(every, sum(shares))
    settles(engines, wanted)


def test_a_role_that_changes_changes_who_gets_the_odd_core(engine: Callable[..., Engine]) -> None:
    first, second = engine(1, 3), engine(1, 3, "decode")
    settles([first, second], [1, 2])
    first.ask("role", "decode")
    second.ask("role", "prefill")
    settles([first, second], [2, 1])


def test_a_decode_engine_sees_whether_prompts_are_read_beside_it(engine: Callable[..., Engine]) -> None:
    writes, other, reads = engine(1, 3, "decode"), engine(1, 3, "decode"), engine(1, 3)
    assert other.cores
    assert not writes.ask("prompts_beside"), "who computes writes answers as well"
    long = "a prompt is read, and nobody knows yet how long a chunk takes"
    until(lambda: bool(reads.cores and writes.ask("prompts_beside") > 1000), long)
    assert not reads.ask("prompts_beside"), "it is itself the one that reads"
    reads.ask("tell_chunk", 0.25)
    until(lambda: bool(reads.cores and writes.ask("prompts_beside") == 0.25), "it is told how long a chunk takes")
    reads.ask("rest")
    assert not writes.ask("prompts_beside")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_killed_or_stands_still_in_the_midst_of_a_step_keeps_no_core(
    engine: Callable[..., Engine], number: signal.Signals
) -> None:
    going, lost = engine(1, 2), engine(1, 2, "decode")
    lost._pipe.send(("work",))
    until(lambda: going.cores == 1, "the other engine computes")
    assert lost.process.pid is not None
    os.kill(lost.process.pid, number)
    until(lambda: going.cores == 2, "its cores come free")


def occupy(page: str, pid: int) -> None:
    """Gives every seat but the first to the process ``pid``."""
    with open(page, "r+b") as memory:
        for seat in range(1, cores.SEATS):
            memory.seek(seat * cores.PAGE_BYTES // cores.SEATS)
            memory.write(pid.to_bytes(4, "little"))


def test_the_seats_of_killed_engines_are_their_successors(page: str, engine: Callable[..., Engine]) -> None:
    going, lost = engine(1, 2), engine(1, 2)
    assert lost.cores
    gone = lost.process.pid
    lost.close()
    occupy(page, gone)
    settles([going, engine(1, 2)], [1, 1])


def test_an_engine_beyond_the_seats_keeps_to_its_share_and_says_so(
    page: str, engine: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    assert engine(1, 2).cores == 2
    occupy(page, os.getpid())
    caplog.set_level(logging.WARNING)
    cores.lend(page, 1, 2).rest()
    assert "64 engines share it already" in caplog.text
    cores.lend("/proc/self/fd/99999", 1, 2).begin_role("decode")
    assert "No such file" in caplog.text


def test_no_bit_depends_on_how_many_cores_there_are_while_others_come_and_go(
    engine: Callable[..., Engine],
) -> None:
    wanted = _linear(*_sample())
    computing, other = engine(1, 4), engine(1, 4, "decode")
    computing._pipe.send(("agrees", wanted, 100))
    for turn in itertools.cycle(("cores", "rest")):
        other.ask(turn)
        if computing._pipe.poll(0.0005):
            break
    assert computing._pipe.recv() is True
