"""Each family's answers are transformers' by every way: colocated, disaggregated, migrated, from a prefix hit.

Real loops on both sides, blocks copied by hand.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.engine.load import EngineConfig, load_runner
from baton.engine.plan import Runner
from baton.protos import channel as ch
from tests.conformance.checkpoints import expected, make, reference
from tests.conformance.kinds import KINDS
from tests.conformance.small_kinds import SMALL
from tests.decode_worker.states import Pair, Worker, request
from tests.thorough import first_now

TOKENS, EMITTED = 40, 21
FAMILIES = sorted({**KINDS, **SMALL})


class Family:
    """A checkpoint's runner, its prompts and what transformers answers to them."""

    def __init__(self, directory: Path) -> None:
        self.runner: Runner = load_runner(EngineConfig(str(directory), threads=1))
        vocabulary = self.runner.spec.vocab_size
        self.prompt = [(7 * i * i + 3) % vocabulary for i in range(70)]
        self.longer = self.prompt[:60] + [(5 * i + 1) % vocabulary for i in range(30)]
        self.answers = {}
        model = reference(directory)
        for prompt in (self.prompt, self.longer):
            worker = Worker(self.runner, 400, "decode")
            worker.admit(1, prompt, local=True)
            worker.finish()
            answer = self.answers[tuple(prompt)] = worker.tokens(1)
            assert answer == expected(model, prompt, answer).argmax(-1).tolist(), "colocated"
            assert len(answer) == TOKENS


@pytest.fixture(scope="module", params=first_now(FAMILIES, 0))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(make(tmp_path_factory.mktemp("family") / request.param, request.param))


def by_handoff(pair: Pair, key: int, prompt: list[int], emitted: int = 0) -> list[int]:
    asked = request(key, prompt, emitted=emitted)
    answers = pair.decode.say(ch.Admit(key, asked, False, 30.0))
    admitted = next(m for m in answers if isinstance(m, ch.Admitted))
    before, unseen = len(pair.prefill.tape.sent), tuple(range(*admitted.unseen))
    pair.prefill.say(ch.Prefill(key, asked, admitted.held_blocks, unseen))
    pair.prefill.finish()
    said = pair.prefill.tape.sent[before:]
    pair.move(said, admitted)
    pair.commit(said, key)
    pair.decode.finish()
    outputs = [o for m in pair.decode.tape.sent if isinstance(m, ch.Tokens) for o in m.outputs if o.key == key]
    return [token for output in outputs for token in output.run.token_ids]


def test_a_handoff_and_one_behind_a_prefix_hit_give_transformers_answers(family: Family) -> None:
    pair = Pair(family.runner)
    for key, prompt in enumerate((family.prompt, family.longer), 1):
        assert by_handoff(pair, key, prompt) == family.answers[tuple(prompt)]
    done = [m.cached_tokens for m in pair.prefill.tape.sent if isinstance(m, ch.PrefillDone)]
    assert done[0] == 0 < done[1], "the second prompt begins with blocks of the first"
    assert pair.prefill.at_baseline()
    assert pair.decode.at_baseline()


def test_a_prefix_hit_of_a_colocated_worker_gives_transformers_answer(family: Family) -> None:
    worker = Worker(family.runner, 400, "decode")
    for key, prompt in enumerate((family.prompt, family.longer), 1):
        worker.admit(key, prompt, local=True)
        worker.finish()
        assert worker.tokens(key) == family.answers[tuple(prompt)]
    assert worker.cached(2) > 0
    assert worker.at_baseline()


def test_an_answer_goes_on_elsewhere_by_a_handoff_as_if_nothing_had_happened(family: Family) -> None:
    whole = family.answers[tuple(family.prompt)]
    found = by_handoff(Pair(family.runner), 1, family.prompt + whole[:EMITTED], emitted=EMITTED)
    assert found == whole[EMITTED:]
