"""Holds a model on several ranks against the same model on one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.kv.layout.tables import table_count
from baton.protos.nouns import Sampling
from tests.conformance.checkpoints import prompts
from tests.engine.backends.ranks.far_threads import on_hosts, require_own_parts
from tests.engine.backends.ranks.threads import SharedDriver, on_ranks

SPOKEN = Sampling(temperature=0.0, max_tokens=5, logprobs=3)
DRAWN = Sampling(temperature=0.8, top_p=0.95, seed=11, max_tokens=5, repetition_penalty=1.1)
READ = Sampling(temperature=0.0, max_tokens=2, prompt_logprobs=2, pooling="mean")


def same_bits(model: Path, count: int, share: str = "tp", chunk: int = 48, hosts: int = 1, **fields: Any) -> None:
    """Holds tokens, logprobs, prompt scores and the pages' bytes of ranks against one rank's.

    ``share`` is what they share, or several such settings joined by +; each is ``count``, or the number behind it.
    Ranks are dealt among ``hosts`` hosts.
    """
    alone = load_runner(EngineConfig(str(model), threads=1, **fields))
    widths = {each[:2]: int(each[2:] or count) for each in share.split("+")}
    config = EngineConfig(str(model), threads=1, rank_bound_s=60.0, **fields, **widths)
    if hosts > 1:
        runner = on_hosts(alone.spec, msgspec.structs.replace(config, rank_hosts=("elsewhere:1",) * (hosts - 1)))
    else:
        runner = on_ranks(alone.spec, config)
    asked = [prompt[: 70 + chunk] for prompt in prompts(alone.spec.vocab_size, 6)]
    pages = 128 * table_count(alone.spec.layout)
    one, many = SharedDriver(alone, pages, chunk=chunk), SharedDriver(runner, pages, chunk=chunk)
    try:
        for sampling in (SPOKEN, DRAWN, READ):
            assert many.answer(asked, sampling) == one.answer(asked, sampling)
        assert many.logprobs == one.logprobs
        assert many.read == one.read
        assert bytes(many.memory.view()) == bytes(one.memory.view())
        if hosts > 1:
            require_own_parts(runner)
    finally:
        runner.leave()
