"""Writes a trace of agents at work, drawn from a stated model, in Mooncake's format (bench/cache_replay.py).

    .venv/bin/python -m bench.agent_trace --seed 1 --requests 12000 > agents.jsonl

The model, with its parameters as constants below:

- Tasks begin as a Poisson process. Each takes one of a few system prompts with tools (Zipf), which all of its calls
  share, and a prompt of its own (log-normal).
- A task is a loop: the model answers, a tool runs, and the next call is the whole conversation with the answer and
  the tool's result appended. Tools take seconds (log-normal); after some answers a person is asked instead, who
  takes minutes. The number of steps is geometric.
- After some steps a task forks: a few sub-agents each go on from the same conversation with a task of their own, of
  a few steps. When the last one is done the parent goes on with their summaries; the sub-agents' own contexts are
  never used again.
- Beside all that come single requests, without a second turn, that share nothing but a system prompt.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

BLOCK = 512  # tokens
SYSTEMS, ZIPF = 8, 1.0  # system prompts with tools, and how unevenly they are used
SYSTEM_TOKENS = (4_000, 0.5)  # median and sigma of log-normals, here and below
TASK_TOKENS, ANSWER_TOKENS, RESULT_TOKENS = (1_500, 0.8), (350, 0.7), (900, 1.2)
TOOL_S, PERSON_S, ANSWER_S = (4.0, 1.0), (120.0, 1.0), (8.0, 0.5)
PERSON_ASKED = 0.12  # of the steps
LAST_STEP, LAST_SUB_STEP = 0.07, 0.25  # the chance that a step is the last one
FORKS, FORKED = 0.05, (2, 4)  # of the steps, and how many sub-agents
SINGLES = 0.35  # of what begins
SINGLE_TOKENS = (2_500, 1.0)
TASKS_PER_S = 0.5
MOST_TOKENS = 120_000


class Agent:
    """Holds one conversation: the ids of its blocks, and what follows its next call."""

    def __init__(self, ids: list[int], tokens: int, last: float, parent: Agent | None = None) -> None:
        self.ids, self.tokens, self.last, self.parent = ids, tokens, last, parent
        self.children = 0


class Call(NamedTuple):
    """Holds one request: when it is sent (seconds), its order, and the conversation that sends it."""

    at: float
    order: int
    agent: Agent


class Model:
    """Draws calls; ``calls`` yields them in order of time, without end."""

    def __init__(self, seed: int) -> None:
        self._draw, self._ids, self._orders = random.Random(seed), itertools.count(), itertools.count()
        self._systems = [self._grown([], 0, self._tokens(*SYSTEM_TOKENS)) for _ in range(SYSTEMS)]
        self._due: list[Call] = []

    def calls(self) -> Iterator[tuple[float, Agent, int]]:
        """Yields (seconds, agent, answer's tokens)."""
        begins = 0.0
        while True:
            while not self._due or begins < self._due[0].at:
                begins += self._draw.expovariate(TASKS_PER_S)
                self._send(begins, self._begun())
            call = heapq.heappop(self._due)
            answer = self._tokens(*ANSWER_TOKENS)
            yield call.at, call.agent, answer
            self._answered(call.at + self._log_normal(*ANSWER_S), call.agent, answer)

    def _begun(self) -> Agent:
        weights = [1 / (1 + rank) ** ZIPF for rank in range(SYSTEMS)]
        ids, tokens = self._draw.choices(self._systems, weights)[0]
        if self._draw.random() < SINGLES:
            return Agent(*self._grown(ids, tokens, self._tokens(*SINGLE_TOKENS)), last=1.0)
        return Agent(*self._grown(ids, tokens, self._tokens(*TASK_TOKENS)), last=LAST_STEP)

    def _answered(self, now: float, agent: Agent, answer: int) -> None:
        agent.ids, agent.tokens = self._grown(agent.ids, agent.tokens, answer)
        if self._draw.random() < agent.last or agent.tokens > MOST_TOKENS:
            self._ended(now, agent)
        elif agent.parent is None and self._draw.random() < FORKS:
            agent.children = self._draw.randint(*FORKED)
            for _ in range(agent.children):
                grown = self._grown(agent.ids, agent.tokens, self._tokens(*ANSWER_TOKENS))
                self._send(now, Agent(*grown, last=LAST_SUB_STEP, parent=agent))
        else:
            self._goes_on(now, agent, self._tokens(*RESULT_TOKENS))

    def _goes_on(self, now: float, agent: Agent, tokens: int) -> None:
        pause = PERSON_S if agent.parent is None and self._draw.random() < PERSON_ASKED else TOOL_S
        agent.ids, agent.tokens = self._grown(agent.ids, agent.tokens, tokens)
        self._send(now + self._log_normal(*pause), agent)

    def _ended(self, now: float, agent: Agent) -> None:
        parent = agent.parent
        if parent is None:
            return
        parent.ids, parent.tokens = self._grown(parent.ids, parent.tokens, self._tokens(*ANSWER_TOKENS))
        parent.children -= 1
        if parent.children == 0:
            self._send(now, parent)

    def _send(self, at: float, agent: Agent) -> None:
        heapq.heappush(self._due, Call(at, next(self._orders), agent))

    def _grown(self, ids: list[int], tokens: int, more: int) -> tuple[list[int], int]:
        """A conversation with ``more`` tokens: blocks that were full stay, the others are new."""
        after = tokens + more
        kept = ids[: tokens // BLOCK]
        return kept + [next(self._ids) for _ in range(len(kept), math.ceil(after / BLOCK))], after

    def _tokens(self, median: float, sigma: float) -> int:
        return max(1, round(self._log_normal(median, sigma)))

    def _log_normal(self, median: float, sigma: float) -> float:
        return self._draw.lognormvariate(math.log(median), sigma)


def lines(seed: int, requests: int) -> Iterator[str]:
    """Yields the trace's lines."""
    for at, agent, answer in itertools.islice(Model(seed).calls(), requests):
        found = {"timestamp": round(at * 1000), "input_length": agent.tokens, "output_length": answer}
        yield json.dumps(found | {"hash_ids": agent.ids})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--requests", type=int, default=12_000)
    args = parser.parse_args()
    for line in lines(args.seed, args.requests):
        print(line)
