"""Another checkpoint is rolled out under the same name: no answer is a mixture of the two, whoever dies meanwhile.

Both sets of weights are paced engines with an oracle each, so one token of the wrong weights is seen.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.e2e.fleet import Fleet, wait_for
from tests.e2e.migration import StreamedAnswer, ask
from tests.e2e.paced import Oracle, slow_profile

TOKENS = 60
pytestmark = pytest.mark.thorough


def body(prompt: list[int]) -> dict:
    asked = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, "stream": True}
    return asked | {"return_token_ids": True, "stream_options": {"include_usage": True}}


@pytest.fixture
def rolling(tmp_path: Path):
    """One prefill and one decode worker of the old weights, as many of the new."""
    profiles = []
    for name, kv in (("old", 1024), ("new", 2048)):
        (tmp_path / name).mkdir()
        profiles.append(slow_profile(tmp_path / name, fixed=0.02, prefill=0.0001, kv=kv))
    router = {"local_prefill_max_tokens": 16, "policy": "round_robin"}
    worker = {"device": f"paced:{profiles[0]}", "model_name": "m", "drain_grace_s": 0.2}
    with Fleet(1, 1, worker=worker, router=router) as fleet:
        become(fleet, profiles[1])
        fleet.scale(2, 2)
        wait_for(fleet.answers, what="the new workers")
        yield fleet, [Oracle(profile) for profile in profiles]


def become(fleet: Fleet, profile: str) -> None:
    """Slots that start from now on run ``profile``."""
    worker = fleet.config.worker.model_copy(update={"device": f"paced:{profile}"})
    fleet.config = fleet.config.model_copy(update={"worker": worker})


async def test_a_killed_and_a_replaced_worker_leave_no_answer_of_two_weights(rolling):
    fleet, (old, new) = rolling
    prompts = [old.prompt(seed, 40 + 30 * (seed % 3)) for seed in range(8)]

    def right(prompt: list[int], heard: StreamedAnswer) -> str:
        """Returns which weights the answer is from, "old" or "new"; "" for a mixture."""
        got = heard.choices[0]["ids"]
        named = {"old": old.answer(prompt, TOKENS), "new": new.answer(prompt, TOKENS)}
        return next((name for name, whole in named.items() if got == whole[: len(got)]), "")

    killed: list[str] = []
    before = {slot: fleet.record(slot).incarnation for slot in fleet.slots}

    def kill(slot: str) -> None:
        if not killed:
            killed.append(slot)
            fleet.kill(slot, "io")

    asked = [asyncio.create_task(ask(fleet, body(prompt), 1, kill)) for prompt in prompts]
    heard = await asyncio.gather(*asked)
    assert {right(p, h) for p, h in zip(prompts, heard, strict=True)} == {"old", "new"}
    for h in heard:  # the killed worker is back with its weights within the wait, or the error has a name
        assert len(h.choices[0]["ids"]) == TOKENS or h.error["code"] == "weights_gone", h.answer

    fleet.wait_for_return(killed[0], before[killed[0]])
    replacing: list[asyncio.Future] = []

    def replace(slot: str) -> None:
        if slot == "decode-0" and not replacing:
            replacing.append(asyncio.get_running_loop().run_in_executor(None, fleet.replace, "decode-0", ()))

    for again in range(1, 10):  # until one was written by the old worker; none of these prompts is cached anywhere
        prompts = [old.prompt(100 * again + seed, 40 + 30 * (seed % 3)) for seed in range(8)]
        heard = await asyncio.gather(*(ask(fleet, body(prompt), 1, replace) for prompt in prompts))
        if replacing:
            break
    await replacing[0]
    kinds = [right(p, h) for p, h in zip(prompts, heard, strict=True)]
    assert set(kinds) == {"old", "new"}
    for kind, h in zip(kinds, heard, strict=True):
        whole = len(h.choices[0]["ids"]) == TOKENS
        assert whole if kind == "new" else h.error["code"] == "weights_gone", h.answer
    wait_for(fleet.answers, what="the replaced worker")
    fleet.wait_for_baseline()
