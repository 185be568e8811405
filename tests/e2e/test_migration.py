"""A decode worker dies, drains or stops mid-answer: the client gets the unbroken answer, to the token.

Each request is asked for twice: once in peace, once with its worker killed under it. Seeded sampling, several
choices, penalties, logprobs and grammars are all in the draw.
"""

import asyncio
import os
import random
import signal
from contextlib import contextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from baton.cluster.departures import GUESSES
from baton.console.cluster.workers import show_workers
from baton.launch import supervise
from baton.protos.v1 import worker_pb2, worker_pb2_grpc
from tests.conformance.checkpoints import make
from tests.e2e.fleet import DRAFT, Fleet, wait_for
from tests.e2e.migration import KINDS, Damage, StreamedAnswer, ask, damage, drawn, kill_under, report
from tests.e2e.paced import slow_profile
from tests.thorough import first_now

KILLS = int(os.environ.get("BATON_SOAK_KILLS", "200"))
ON_CPU = 0.3  # of them
BROAD = ("seeded", "grammar, n>1")  # kinds that between them have what the others have


@pytest.fixture(scope="module", autouse=True)
def every_death_is_a_first_one():
    """No growing pause before a worker that we kill again and again is started."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(supervise, "HEALTHY_S", 0.0)
        yield


@pytest.fixture(scope="module")
def paced(tmp_path_factory):
    profile = slow_profile(Path(tmp_path_factory.mktemp("paced")), fixed=0.01, prefill=0.0001, kv=1024)
    router = {"local_prefill_max_tokens": 16, "stall_s": 2.0}
    with Fleet(1, 2, worker={"device": f"paced:{profile}"}, router=router) as fleet:
        yield fleet


@contextmanager
def cpu_fleet():
    with Fleet(1, 2, worker={"model": DRAFT, "threads": 1}, router={"local_prefill_max_tokens": 16}) as fleet:
        yield fleet


@pytest.mark.parametrize("kind", first_now(sorted(KINDS, key=lambda kind: kind not in BROAD), len(BROAD)))
async def test_a_kill_mid_stream_costs_a_pause_and_not_a_token(paced, kind):
    kill = await kill_under(paced, [*KINDS].index(kind), 4096)
    assert kill.damage == Damage(), kill
    paced.wait_for_baseline()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "vocab"),
    [
        ("gemma3", 777),
        ("gpt_oss", 1013),
        ("qwen3_next", 1003),
        ("bamba", 1003),
        ("jamba", 331),
        ("deepseek_v3", 1003),
        ("gemma3n", 331),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (
                *(("gemma2", 1003), ("phi3", 1021), ("olmo2", 1009), ("llama4", 331)),
                *(("qwen3_5", 1009), ("deepseek_v2", 1024)),
            )
        ),
    ],
)
async def test_answers_over_windows_sinks_latents_and_states_move_to_the_token(tmp_path, family, vocab):
    model = make(tmp_path / family, family, tokenizer=True)
    settings = {"model": str(model), "threads": 1}
    with Fleet(1, 2, worker=settings, router={"local_prefill_max_tokens": 16}) as fleet:
        for seed in range(2):
            kill = await kill_under(fleet, seed, vocab)
            assert kill.damage == Damage(), kill
        fleet.wait_for_baseline()


async def test_draining_a_worker_moves_its_requests_and_none_fails(paced):
    bodies = [drawn(random.Random(100 + i), 4096, kind) | {"max_tokens": 60} for i, kind in enumerate(KINDS)]
    unbroken = [await ask(paced, body) for body in bodies]
    drained: list[str] = []

    def drain(slot: str) -> None:
        if not drained:
            drained.append(slot)
            channel = grpc.insecure_channel(paced.record(slot).address)
            stub = worker_pb2_grpc.WorkerStub(channel)
            replies.append(stub.Drain.future(worker_pb2.DrainRequest(grace_seconds=50), timeout=60))

    replies: list = []
    try:
        broken = await asyncio.gather(*(ask(paced, body, 3, drain) for body in bodies))
        assert [b.answer for b in broken] == [u.answer for u in unbroken]
        reply = await asyncio.to_thread(replies[0].result, 60)
        assert reply.cancelled == 0  # nothing was left to cancel: its requests had gone elsewhere
    finally:
        before = paced.record(drained[0]).incarnation
        paced.kill(drained[0], "io")  # a drained worker stays so until it is started again
        paced.wait_for_return(drained[0], before)


@pytest.mark.parametrize("part", first_now(["engine", "io"]))
async def test_a_stopped_worker_is_noticed_and_its_requests_move(paced, part):
    body = drawn(random.Random(7), 4096, "n>1")
    unbroken = await ask(paced, body)
    stopped: list[int] = []

    def stop(slot: str) -> None:
        record = paced.record(slot)
        stopped.append(record.engine_pid if part == "engine" else record.pid)
        os.kill(stopped[0], signal.SIGSTOP)

    try:
        broken = await ask(paced, body, 5, stop)  # the rest comes while the worker is stopped, so not from it
        assert broken.answer == unbroken.answer
        await asyncio.to_thread(wait_for, lambda: paced.reachable() == 2, what="the stopped worker being left out")
    finally:
        os.kill(stopped[0], signal.SIGCONT)
    await asyncio.to_thread(wait_for, lambda: paced.reachable() == 3, what="the stopped worker being back")


def test_what_a_worker_died_of_is_in_the_clusters_view_until_it_is_old(paced, capsys):
    causes = {"io": ("signal", "SIGKILL"), "engine": ("engine", "the engine of decode-0 died (SIGKILL)")}
    for part, (cause, detail) in causes.items():
        before = paced.record("decode-0").incarnation
        paced.kill("decode-0", part)
        paced.wait_for_return("decode-0", before)

        def left(before: str = before) -> list[dict]:
            departed = httpx.get(paced.url + "/v1/cluster", timeout=30).json()["departed"]
            # A router may have seen its successor before its supervisor has said what it died of.
            return [d for d in departed if d["incarnation"] == before and d["cause"] not in GUESSES]

        [gone] = wait_for(left, what="the record")
        assert (gone["worker_id"], gone["role"]) == ("decode-0", "decode")
        assert (gone["cause"], gone["detail"]) == (cause, detail)
    show_workers(paced.config.redis.url, paced.config.cluster.namespace)
    assert "the engine of decode-0 died" in capsys.readouterr().out


@pytest.mark.thorough  # of the paced engine: above; of the real one: tests/decode_worker/test_families.py
async def test_a_kill_mid_stream_is_token_identical_on_the_cpu_engine_too():
    with cpu_fleet() as fleet:
        kill = await kill_under(fleet, 11, 500)  # a grammar with several choices
        assert kill.damage == Damage(), kill


def heard(*choices: list[int]) -> StreamedAnswer:
    """An answer with these ids."""
    answer = StreamedAnswer()
    for index, ids in enumerate(choices):
        answer.take({"choices": [{"index": index, "token_ids": ids, "text": "", "finish_reason": "length"}]})
    return answer


@pytest.mark.parametrize(
    ("broken", "found"),
    [
        (heard([1, 2, 3], [4, 5]), Damage()),
        (heard([1, 9, 3], [4, 5]), Damage(wrong=1, other=1)),
        (heard([1, 2], [4, 5]), Damage(lost=1, other=1)),
        (heard([1, 2, 3], [4, 5, 5]), Damage(repeated=1, other=1)),
        (heard([1, 2, 3]), Damage(lost=2, other=1)),
    ],
    ids=["same", "wrong", "lost", "repeated", "a choice lost"],
)
def test_what_a_migration_may_not_do_is_counted(broken: StreamedAnswer, found: Damage) -> None:
    assert damage(broken, heard([1, 2, 3], [4, 5])) == found


async def _many(engine: str, fleet: Fleet, seeds: range, vocab: int) -> None:
    kills = [await kill_under(fleet, seed, vocab) for seed in seeds]
    print(report(engine, kills), flush=True)
    assert [kill for kill in kills if kill.damage != Damage()] == []
    fleet.wait_for_baseline()
    print(fleet.hung(), end="", flush=True)  # not an assertion: at load 25 an orderly leave takes as long


@pytest.mark.soak
@pytest.mark.timeout(3600)
async def test_200_seeded_kills_are_not_seen_in_any_answer(paced):
    on_cpu = round(KILLS * ON_CPU)
    await _many("paced", paced, range(1000, 1000 + KILLS - on_cpu), 4096)
    with cpu_fleet() as fleet:
        await _many("CPU", fleet, range(2000, 2000 + on_cpu), 500)
