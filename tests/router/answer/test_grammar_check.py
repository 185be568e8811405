"""Grammars are tried before anything is queued: verdicts are a tenant's own, and nobody waits for another's."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import signal
import sys
from pathlib import Path

import pytest

from baton.grammars.limits import ProcessBounds
from baton.protos.errors import InvalidRequest, Overloaded, Unavailable
from baton.protos.nouns import Grammar
from baton.router.answer import grammar_check
from baton.router.answer.grammar_check import GrammarCheck

POISON = "start: A\nA: /(.*a.{22}.*)/ & ~/(.*b.{22}.*)/"
BAD = Grammar("regex", "(")


def poison(n: int) -> Grammar:
    return Grammar("grammar", POISON.replace("22", str(n)))


def processes(check: GrammarCheck) -> list[int]:
    process = check._server._process
    assert process is not None
    return list(map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()))


def forked(check: GrammarCheck) -> int:
    return len(processes(check))


async def test_a_verdict_is_kept_for_its_tenant_alone(monkeypatch) -> None:
    check = GrammarCheck()
    tried: list[str] = []
    real = check._judge

    async def judge(message):
        tried.append(message.spec)
        return await real(message)

    monkeypatch.setattr(check, "_judge", judge)
    for tenant, salt in (("a", b"1"), ("a", b"1"), ("a", b"2"), ("b", b"1")):
        with pytest.raises(InvalidRequest, match="field: the grammar"):
            await check.check(BAD, "field", tenant, salt)
    assert len(tried) == 3


async def test_what_is_kept_is_bounded_for_a_tenant_and_in_all(monkeypatch) -> None:
    monkeypatch.setattr(grammar_check, "TENANT_KNOWN", 2)
    monkeypatch.setattr(grammar_check, "TENANTS_KNOWN", 2)
    check = GrammarCheck()
    for tenant in ("a", "b", "c"):
        for text in ("x", "y", "z"):
            await check.check(Grammar("regex", text), "field", tenant)
    assert {tenant: len(known) for tenant, known in check._known.items()} == {"b": 2, "c": 2}


async def test_a_crowd_of_new_grammars_is_turned_away_at_its_own_tenants_cost(monkeypatch) -> None:
    monkeypatch.setattr(grammar_check, "MOST_WAITING", 2)
    check, go = GrammarCheck(), asyncio.Event()
    monkeypatch.setattr(check, "_judge", lambda message: go.wait())
    crowd = [asyncio.create_task(check.check(Grammar("regex", f"a{i}"), "field", "crowd")) for i in range(5)]
    other = asyncio.create_task(check.check(Grammar("regex", "b"), "field"))
    await asyncio.sleep(0)
    assert [task.done() for task in crowd] == [False, False, False, True, True]
    assert not other.done()
    for task in (*crowd, other):
        task.cancel()
    found = await asyncio.gather(*crowd, other, return_exceptions=True)
    assert sum(isinstance(one, Overloaded) for one in found) == 2


async def test_one_grammar_that_many_ask_for_at_once_is_tried_once(monkeypatch) -> None:
    check = GrammarCheck()
    tried = 0

    async def judge(message):
        nonlocal tried
        tried += 1
        await asyncio.sleep(0)

    monkeypatch.setattr(check, "_judge", judge)
    await asyncio.gather(*(check.check(Grammar("regex", "a"), "field") for _ in range(20)))
    assert tried == 1


async def test_a_poisonous_tenant_delays_nobody_elses_ordinary_schema() -> None:
    check = GrammarCheck(ProcessBounds(compile_cpu_s=20.0))
    poisons = [asyncio.create_task(check.check(poison(n), "guided_grammar", "poisonous")) for n in range(20, 28)]
    await asyncio.sleep(0)
    await check.check(Grammar("json_schema", '{"type": "integer"}'), "field", "ordinary")
    assert sum(task.done() for task in poisons) <= 1
    for task in poisons:
        task.cancel()
    await asyncio.gather(*poisons, return_exceptions=True)


async def test_a_grammar_that_is_too_complex_is_a_400_that_names_the_field_and_the_remedy() -> None:
    check = GrammarCheck(ProcessBounds(compile_cpu_s=0.1))
    with pytest.raises(InvalidRequest, match=r"over 0\.1 s of CPU.*use shorter repeats") as caught:
        await check.check(poison(22), "guided_grammar")
    assert (caught.value.param, caught.value.http_status) == ("guided_grammar", 400)


async def test_a_client_that_leaves_takes_its_process_with_it() -> None:
    check = GrammarCheck(ProcessBounds(compile_cpu_s=600.0, memory_bytes=1 << 30))
    task = asyncio.create_task(check.check(poison(22), "field"))
    await check.check(Grammar("regex", "a"), "field", "somebody else")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await check.check(Grammar("regex", "b"), "field")
    async with asyncio.timeout(60):
        while forked(check) > 1:  # the spare
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("times", [1, 99])
async def test_a_process_that_was_killed_is_not_the_grammars_fault(monkeypatch, times: int) -> None:
    check = GrammarCheck(ProcessBounds(compile_cpu_s=40.0 + times))
    real, left = check._server.child, times

    def child():
        nonlocal left
        found = real()
        if left:
            left -= 1
            poller = select.poll()
            poller.register(found.socket, select.POLLIN)
            assert found.begun or poller.poll(60_000)  # it is ready, and hasn't been given the grammar
            for pid in processes(check):
                os.kill(pid, signal.SIGKILL)
        return found

    monkeypatch.setattr(check._server, "child", child)
    if times > 1:
        with pytest.raises(Unavailable):
            await check.check(Grammar("regex", "a"), "field")
        left = 0
    await check.check(Grammar("regex", "a"), "field")


async def test_a_machine_without_a_process_to_spare_is_no_verdict(monkeypatch) -> None:
    def start():
        raise OSError(errno.EMFILE, "Too many open files")

    check = GrammarCheck(ProcessBounds(compile_cpu_s=50.0))
    with monkeypatch.context() as short:
        short.setattr(check._server, "_start", start)
        with pytest.raises(Unavailable):
            await check.check(Grammar("regex", "a"), "field")
    await check.check(Grammar("regex", "a"), "field")


@pytest.mark.parametrize("text", ["a" * 70_000, "é" * 40_000, "a\ud800"])
async def test_a_grammar_too_long_or_of_no_text_is_never_sent(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"bytes: shorten|surrogate") as caught:
        await GrammarCheck().check(Grammar("regex", text), "guided_regex")
    assert caught.value.param == "guided_regex"


async def test_no_text_of_a_client_is_read_in_the_routers_own_process() -> None:
    """The finder of what held the loop: lines that this process runs, counted, are the same for n and for 2n."""

    async def lines(text: str) -> int:
        count = 0

        def tracer(frame, event, arg):
            nonlocal count
            count += event == "line" and "grammar" in frame.f_code.co_filename
            return tracer

        check = GrammarCheck()
        sys.settrace(tracer)
        try:
            with pytest.raises(InvalidRequest):
                await check.check(Grammar("grammar", text), "field")
        finally:
            sys.settrace(None)
        return count

    for unit in ("\n", "root ::= ", "r ::= r\n", "#\n"):
        assert abs(await lines(unit * 3000) - await lines(unit * 6000)) < 100
    assert not any(name == "llguidance" for name in vars(grammar_check))
