"""Judges a running server by its answers: leaked, changed, lost or repeated text, hangs, and false health reports.

Each question is asked alone, twice whole and once streamed; then all at once under load, beside clients that
disconnect; then some alone again. Answers that differ between the two whole ones are the server's own randomness,
and are not compared further. Where processes are killed meanwhile (``kills.py``), answers may fail or end in an
error from the first kill on, but what they say must be right, and the server must answer again.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from baton.drill.live.answers import Answer, Asker, Question
from baton.drill.live.http import Http, Unreachable
from baton.drill.live.kills import Kills

HEADS = 4  # prefixes that questions share
LOOK_S = 0.2  # seconds between two looks at the server's health
CALM_S = 20.0  # seconds that a server has to be calm after the last request
HEALTH = ("/health", "/ready")
RUNNING = (
    "num_requests_running",
    "baton_running",
    "requests_processing",
)  # gauges of requests in flight, by server
GAUGE = re.compile(r"([^#\s{]+)(?:\{.*\})?\s+([-+.\dEe]+)(?:\s+-?\d+)?")  # a line of Prometheus
WORDS = (
    "river", "stone", "winter", "garden", "letter", "window", "mountain", "paper", "silver", "morning", "market",
    "bridge", "station", "candle", "harbor", "copper", "forest", "engine", "island", "velvet", "thunder", "mirror",
)  # fmt: skip


class Scorecard(msgspec.Struct):
    """The faults found in a server, as lists of messages. ``differs`` may be due to other batch sizes, and fails
    nobody.
    """

    requests: int = 0
    answered: int = 0  # requests with complete and valid answers
    refused: int = 0  # requests that failed with a status or a broken connection
    foreign: list[str] = []  # text of another request's prompt
    broken: list[str] = []  # protocol violations
    endless: list[str] = []  # streams or answers without an end
    unlike: list[str] = []  # streamed answers unlike the whole ones
    differs: list[str] = []  # answers under load or after it that differ from those alone
    health: list[str] = []  # health reports that were false
    held: list[str] = []  # requests still running after all clients have left
    random_alone: int = 0  # questions whose two answers alone differ
    killed: list[int] = []  # processes that the judge killed, by pid
    missing: list[int] = []  # processes that were to be killed and had gone before
    recovered_s: float = 0.0  # seconds from the end of the load until an answer came, where processes were killed

    @property
    def passed(self) -> bool:
        """Returns whether the server did nothing that no server may do."""
        found = self.foreign, self.broken, self.endless, self.unlike, self.health, self.held
        return not any(found) and not self.missing


class LiveLoad(msgspec.Struct, frozen=True):
    """The amount and the shape of the load that a live server is judged under."""

    questions: int = 24
    rounds: int = 4  # times that each question is asked under load
    at_once: int = 16  # requests in flight
    max_tokens: int = 24  # of the longest answer
    limit_s: float = 120.0  # seconds for one answer
    seed: int = 0
    pids: tuple[int, ...] = ()  # processes to kill under load, each once
    recovery_s: float = 120.0  # seconds after the load within which the server must answer again after kills


class LiveJudge:
    """Judges the server at ``url``; ``key`` is a bearer token or "", ``model`` the model to ask, "" for the first
    listed.
    """

    def __init__(self, url: str, key: str = "", model: str = "", plan: LiveLoad = LiveLoad()) -> None:
        self._http, self._plan, self._model = Http(url, key), plan, model
        self._rng = random.Random(plan.seed)
        self.card = Scorecard()
        self._questions = questions(plan, self._rng)
        self._working = 0
        self._kills = Kills(plan.pids, random.Random(f"kills {plan.seed}"))

    async def run(self) -> Scorecard:
        """Runs all probes against the server and returns what was found. Raises Unreachable if no model can be
        listed.
        """
        model = self._model or await self._first_model()
        self._asker = Asker(self._http, model, self._plan.limit_s)
        alone = [await self._alone(question) for question in self._questions]
        watching = asyncio.create_task(self._watch_health())
        killing = asyncio.create_task(self._kills.play(lambda: self.card.requests, self._load))
        await self._storm(alone)
        await killing
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        self.card.killed, self.card.missing = self._kills.killed, self._kills.missing
        if self._kills.killed:
            await self._recovers()
        for question, before in zip(self._questions[:4], alone, strict=False):
            self._hold(question, before, await self._ask(self._asker.whole, question), "after the load")
        await self._calm()
        return self.card

    @property
    def _load(self) -> int:
        """Returns the number of requests that are asked at once."""
        return self._plan.questions * self._plan.rounds

    async def _first_model(self) -> str:
        try:
            async with asyncio.timeout(self._plan.limit_s):
                reply = await self._http.ask("/v1/models")
        except TimeoutError:
            raise Unreachable(f"/v1/models has no answer within {self._plan.limit_s:g} s") from None
        models = reply.body.get("data") or []
        if reply.status != 200 or not models:
            raise Unreachable(f"/v1/models names no model (status {reply.status})")
        return str(models[0]["id"])

    # ---- probes ----

    async def _alone(self, question: Question) -> str | None:
        """Returns the text that the server answers ``question`` with when idle; None if two tries differ or one
        fails.
        """
        first, again = [await self._ask(self._asker.whole, question) for _ in range(2)]
        streamed = await self._ask(self._asker.streamed, question)
        if not (first.whole and again.whole and streamed.whole):
            return None
        if first.texts != again.texts:
            self.card.random_alone += 1
            return None
        if streamed.texts != first.texts:
            self.card.unlike.append(_unlike("streamed", question, first.texts[0], streamed.texts[0]))
        if streamed.tokens is not None and first.tokens is not None and streamed.tokens != first.tokens:
            self.card.unlike.append(f"usage counts {first.tokens} tokens whole and {streamed.tokens} streamed")
        return first.texts[0]

    async def _storm(self, alone: Sequence[str | None]) -> None:
        places = asyncio.Semaphore(self._plan.at_once)
        asked = [(q, a) for q, a in zip(self._questions, alone, strict=True) for _ in range(self._plan.rounds)]
        self._rng.shuffle(asked)

        async def one(question: Question, before: str | None, way: float, events: int) -> None:
            async with places:
                if way < 0.2:
                    await self._ask(lambda q: self._asker.leave(q, events), question)
                    return
                ask = self._asker.streamed if way < 0.7 else self._asker.whole
                self._hold(question, before, await self._ask(ask, question), "under load")

        await asyncio.gather(*(one(q, a, self._rng.random(), self._rng.randint(1, 6)) for q, a in asked))

    async def _ask(self, ask: Callable[[Question], Awaitable[Answer]], question: Question) -> Answer:
        self.card.requests += 1
        answer = await ask(question)
        if answer.failed:
            self.card.refused += 1
            return answer
        self._working += not answer.cut
        self.card.answered += answer.whole
        ends = [text for text in answer.wrong if text.startswith("no end")]
        self.card.endless += ends
        self.card.broken += [text for text in answer.wrong if text not in ends]
        if answer.cut and self._kills.killed:
            self.card.refused += 1
        elif answer.cut:
            self.card.broken.append(answer.cut)
        self._look_for_foreign(question, answer)
        return answer

    def _look_for_foreign(self, question: Question, answer: Answer) -> None:
        for other in self._questions:
            if other.needle != question.needle and any(other.needle in text for text in answer.texts):
                self.card.foreign.append(
                    f"{other.needle!r} of another prompt is in an answer: {answer.texts!r}"[:200]
                )

    def _hold(self, question: Question, before: str | None, answer: Answer, when: str) -> None:
        if before is None or not (answer.whole or answer.cut):
            return
        text = answer.texts[0]
        if text != before if answer.whole else not before.startswith(text):
            self.card.differs.append(_unlike(when, question, before, text))

    # ---- health and rest ----

    async def _recovers(self) -> None:
        """Asks until the server answers, ``recovery_s`` at most, and requires that it does."""
        loop = asyncio.get_running_loop()
        began, tries = loop.time(), 0
        while loop.time() - began < self._plan.recovery_s:
            answer = await self._ask(self._asker.whole, self._questions[tries % len(self._questions)])
            if answer.whole:
                self.card.recovered_s = loop.time() - began
                return
            tries += 1
            await asyncio.sleep(LOOK_S)
        self.card.health.append(f"nothing is answered within {self._plan.recovery_s:g} s after the kills")

    async def _watch_health(self) -> None:
        path = await self._health_path()
        while path and not self._kills.killed:  # a server that lost processes may well be ill and answer some
            before, status = self._working, await self._status(path)
            await asyncio.sleep(LOOK_S)
            if status != 200 and self._working > before and await self._status(path) != 200:
                self.card.health.append(f"{path} says {status} while requests are answered")
            await asyncio.sleep(LOOK_S)

    async def _calm(self) -> None:
        """Checks that a server that reports health answers, and that within CALM_S it counts no request as
        running.
        """
        path = await self._health_path()
        if path and await self._status(path) == 200:
            last = await self._ask(self._asker.whole, self._questions[0])
            if last.failed:
                self.card.health.append(f"{path} says 200 and a request fails: {last.failed}")
        deadline = asyncio.get_running_loop().time() + CALM_S
        while (held := await self._running()) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)
        if held:
            self.card.held.append(f"{held:g} requests run {CALM_S:g} s after the last one was asked")

    async def _health_path(self) -> str:
        for path in HEALTH:
            if await self._status(path) not in (404, 405, 0):
                return path
        return ""

    async def _status(self, path: str) -> int:
        try:
            async with asyncio.timeout(self._plan.limit_s):
                return (await self._http.text(path))[0]
        except (Unreachable, TimeoutError):
            return 0

    async def _running(self) -> float:
        """Returns the number of running requests by the server's metrics; 0 if it doesn't expose one."""
        try:
            async with asyncio.timeout(self._plan.limit_s):
                status, text = await self._http.text("/metrics")
        except (Unreachable, TimeoutError):
            return 0.0
        found = (GAUGE.fullmatch(line) for line in text.splitlines()) if status == 200 else ()
        return sum(float(line[2]) for line in found if line and any(name in line[1] for name in RUNNING))


def questions(plan: LiveLoad, rng: random.Random) -> list[Question]:
    """Draws ``plan.questions`` questions whose prompts share prefixes; each prompt has its own needle in the
    middle.
    """
    heads = [" ".join(rng.choices(WORDS, k=rng.randint(20, 120))) for _ in range(HEADS)]
    found = []
    for number in range(plan.questions):
        needle = (
            "".join(rng.choices("bcdfghklmnprstvz", k=4)) + f"{number:02d}" + "".join(rng.choices("aeiou", k=3))
        )
        tail = " ".join(rng.choices(WORDS, k=rng.randint(2, 40)))
        prompt = f"{rng.choice(heads)}. The secret word is {needle}. {tail}. The secret word is"
        found.append(Question(prompt, rng.randint(2, plan.max_tokens), needle))
    return found


def _unlike(when: str, question: Question, want: str, got: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), min(len(want), len(got)))
    return (
        f"{when}, {question.needle}: from character {at} on {got[at : at + 30]!r} instead of {want[at : at + 30]!r}"
    )
