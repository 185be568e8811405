"""A decode loop over a real pool, real pages and the paced engine; only the channel is a list."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.backends.paced.runner import PacedRunner, paced_answer, rows_after
from baton.engine.steps.parts import EngineParts
from baton.kernels.abi.cores import LentCores
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling, TokenRun

KV, VOCAB, CONTEXT = 32, 997, 4096
MODEL: dict[str, Any] = {"kv_bytes_per_token": KV, "vocab_size": VOCAB, "max_model_len": CONTEXT}


class Tape:
    """The engine's end of a channel that only remembers."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def poll(self, timeout_s: float) -> list[Any]:
        return []


class Bench:
    """A decode loop and what its I/O process would do, by hand."""

    def __init__(
        self, pages: int = 64, runner: Any = None, grammars: Any = None, cores: Any = LentCores(), **limits: Any
    ):
        self.now = 0.0
        self.memory = PageMemory.create(pages, 16 * KV)
        self.runner = runner or PacedRunner("test", step_seconds=lambda s: 0.0, **MODEL)
        self.runner.bind(self.memory.view(), pages)
        self.pool, self.tape = PagePool(pages), Tape()
        ids = itertools.count(1)
        self.loop = DecodeLoop(
            EngineParts.around(
                self.runner,
                self.pool,
                self.tape,
                lambda: self.now,
                grammars,
                memory=self.memory.view(),
                cores=cores,
            ),
            DecodeLimits(**{"max_batch": 8, "chunk_tokens": 64, "ttl_s": 30.0} | limits),
            entropy=lambda n: next(ids).to_bytes(n, "big"),
        )
        self._keys = itertools.count(1)

    def say(self, *messages: Any) -> list[Any]:
        """One turn with these messages; what the engine answered, without reports."""
        before = len(self.tape.sent)
        self.loop.turn(list(messages))
        return [m for m in self.tape.sent[before:] if not isinstance(m, (ch.Stats, ch.CacheChanged))]

    def admit(self, prompt: list[int], local: bool, ttl_s: float = 0.0, **sampling: Any) -> ch.Admitted:
        answered = self.say(ch.Admit(key := next(self._keys), request(key, prompt, **sampling), local, ttl_s))
        return next(m for m in answered if isinstance(m, (ch.Admitted, ch.Refused)) and m.key == key)

    def deliver(self, admitted: ch.Admitted, prompt: list[int], epoch: int = 1) -> None:
        """Write the prompt's KV as a prefill worker would have, and report it."""
        rows = list(rows_after(b"", prompt, 0, KV))
        for i, page in enumerate(admitted.pages[admitted.held_blocks :], admitted.held_blocks):
            data = b"".join(rows[16 * i : 16 * i + 16])
            self.memory.page(page)[: len(data)] = data
        blocks = tuple(range(admitted.held_blocks, len(admitted.pages)))
        self.say(ch.ReceiveOpened(admitted.key, epoch), ch.BlocksReceived(admitted.key, epoch, blocks))

    def commit(self, admitted: ch.Admitted, prompt: list[int], epoch: int = 1, **sampling: Any) -> list[Any]:
        first = answer(prompt, **sampling)[0]
        return self.say(ch.Commit(admitted.key, epoch, TokenRun(0, (first,)), 0))

    def finish(self, *keys: int, turns: int = 500) -> dict[int, list[int]]:
        """Turn until nothing runs; tokens by key, checked for their indices."""
        for _ in range(turns):
            if not self.loop.turn([]):
                break
        return {key: self.tokens(key) for key in keys}

    def tokens(self, key: int) -> list[int]:
        outputs = [o for m in self.tape.sent if isinstance(m, ch.Tokens) for o in m.outputs if o.key == key]
        got = [t for o in outputs for t in o.run.token_ids]
        assert [o.run.output_index for o in outputs] == list(range(len(outputs)))
        return got

    def at_baseline(self) -> bool:
        self.pool.check()
        return self.loop.snapshot().at_baseline and not self.loop.requests and not self.loop.receives


def request(
    key: int, prompt: list[int], choice: int = 0, emitted: tuple[int, ...] = (), **sampling: Any
) -> EngineRequest:
    fields = {"temperature": 0.0, "max_tokens": 8} | sampling
    return EngineRequest(f"r{key}", (*prompt, *emitted), len(prompt), Sampling(**fields), choice)


def answer(prompt: list[int], choice: int = 0, until: Any = None, **sampling: Any) -> list[int]:
    """The whole answer, within the grammar ``until`` if there is one."""
    asked = Sampling(**{"temperature": 0.0, "max_tokens": 8} | sampling)
    return paced_answer(prompt, asked, choice, grammar=until, **MODEL)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(7 * i + 131 * salt + 3) % VOCAB for i in range(length)]


@pytest.fixture
def bench() -> Bench:
    return Bench()
