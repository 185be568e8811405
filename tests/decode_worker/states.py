"""A prefill and a decode loop over one small hybrid checkpoint; blocks move between their pages by hand.

Knows nothing of transformers: what the model answers alone, by ``Driver``, is what every way must give.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

from baton.decode_worker.engine.limits import DecodeLimits
from baton.decode_worker.engine.loop import DecodeLoop
from baton.engine.plan import Runner
from baton.engine.steps.loop import StepLoop
from baton.engine.steps.parts import EngineParts
from baton.kv.layout.state import state_pages
from baton.kv.memory.host_pages import PageMemory
from baton.kv.pages.pool import PagePool
from baton.prefill_worker.engine.loop import PrefillLoop
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from tests.decode_worker.engine.loop_bench import Tape

EVERY = 2  # blocks between checkpoints, so that short prompts have several


class Worker:
    """One loop with pages of its own; ``runner`` is bound to them before each turn, as it is shared."""

    def __init__(self, runner: Runner, pages: int, role: str, chunk: int = 48, memory: bool = False) -> None:
        self.runner, self.pages = runner, pages
        self.memory = PageMemory.create(pages, runner.spec.layout.page_bytes)
        self.pool, self.tape, self.now = PagePool(pages, runner.spec.layout.block_tokens), Tape(), 0.0
        view = self.memory.view() if memory else None
        parts = EngineParts.around(runner, self.pool, self.tape, lambda: self.now, memory=view, state_every=EVERY)
        ids = itertools.count(1)
        self.loop: StepLoop = (
            PrefillLoop(parts, chunk, 8)
            if role == "prefill"
            else DecodeLoop(parts, DecodeLimits(8, chunk), entropy=lambda n: next(ids).to_bytes(n, "big"))
        )

    def say(self, *messages: Any) -> list[Any]:
        """One turn with these messages; what the engine answered, without reports."""
        self.runner.bind(self.memory.view(), self.pages)
        before = len(self.tape.sent)
        self.loop.turn(list(messages))
        return [m for m in self.tape.sent[before:] if not isinstance(m, (ch.Stats, ch.CacheChanged))]

    def finish(self) -> None:
        self.runner.bind(self.memory.view(), self.pages)
        for _ in range(2000):
            if not self.loop.turn([]):
                return

    def tokens(self, key: int) -> list[int]:
        outputs = [o for m in self.tape.sent if isinstance(m, ch.Tokens) for o in m.outputs if o.key == key]
        assert [o.run.output_index for o in outputs] == list(range(outputs[0].run.output_index, len(outputs)))
        return [token for o in outputs for token in o.run.token_ids]

    def cached(self, key: int) -> int:
        return sum(
            o.cached_tokens for m in self.tape.sent if isinstance(m, ch.Tokens) for o in m.outputs if o.key == key
        )

    def admit(self, key: int, prompt: list[int], local: bool, **sampling: Any) -> ch.Admitted:
        answers = self.say(ch.Admit(key, request(key, prompt, **sampling), local, 30.0))
        return next(m for m in answers if isinstance(m, ch.Admitted) and m.key == key)

    def at_baseline(self) -> bool:
        self.pool.check()
        counts = self.pool.snapshot_counts()
        return self.loop.empty and (counts.leased, counts.quarantined, counts.leases) == (0, 0, 0)


def request(key: int, prompt: list[int], max_tokens: int = 40, emitted: int = 0) -> EngineRequest:
    sampling = Sampling(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return EngineRequest(f"r{key}", tuple(prompt), len(prompt) - emitted, sampling)


class Pair:
    """A prefill and a decode worker of one model."""

    def __init__(self, runner: Runner, pages: int = 400, **decode: Any) -> None:
        self.prefill, self.decode = Worker(runner, pages, "prefill"), Worker(runner, pages, "decode", **decode)
        self.parts = state_pages(runner.spec.layout)
        self.shipped = 0

    def compute(self, key: int, prompt: list[int], held: int, received: Collection[int] = ()) -> list[Any]:
        """Reads a prompt; everything that the prefill engine said of it."""
        before = len(self.prefill.tape.sent)
        self.prefill.say(ch.Prefill(key, request(key, prompt), held, tuple(received)))
        self.prefill.finish()
        return self.prefill.tape.sent[before:]

    def move(self, said: list[Any], admitted: ch.Admitted, epoch: int = 1, most: int = 10**6) -> None:
        """Copies up to ``most`` blocks to where the lease wants them, the last ones first."""
        blocks = [block for m in said if isinstance(m, ch.BlocksReady) for block in m.blocks][::-1][:most]
        for block in blocks:
            assert block.hash == admitted.hashes[block.index], "each page comes under its own hash"
            self.decode.memory.page(admitted.pages[block.index])[:] = self.prefill.memory.page(block.page)
        self.shipped += len(blocks)
        numbers = tuple(block.index for block in blocks)
        self.decode.say(ch.ReceiveOpened(admitted.key, epoch), ch.BlocksReceived(admitted.key, epoch, numbers))

    def commit(self, said: list[Any], key: int, epoch: int = 1) -> None:
        done = next(m for m in said if isinstance(m, ch.PrefillDone))
        self.decode.say(ch.Commit(key, epoch, done.first, done.cached_tokens))
        self.decode.say(ch.ReceiveClosed(key, epoch))
        self.prefill.say(ch.SendClosed(done.key))

    def answer(self, key: int, prompt: list[int]) -> list[int]:
        admitted = self.decode.admit(key, prompt, local=False)
        said = self.compute(key, prompt, admitted.held_blocks)
        self.move(said, admitted)
        self.commit(said, key)
        self.decode.finish()
        return self.decode.tokens(key)
