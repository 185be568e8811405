"""Pages of which each host of ranks has its part: what is shown, what comes to each, and what is made whole.

Ranks of several hosts are threads with memory of their own (``far_threads.py``).
"""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from baton.engine.backends.ranks import notes
from baton.engine.backends.ranks.hosts.parts import parts_of_hosts
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.engine.sequence import SequenceState
from baton.engine.steps.sharing import PageSharing
from baton.kernels.abi import native
from baton.kv.layout.extents import gather
from baton.kv.layout.state import state_pages
from baton.kv.layout.tables import table_count
from baton.kv.pages.pool import PagePool
from baton.protos import channel as ch
from baton.protos.nouns import EngineRequest, Sampling
from tests.conformance.checkpoints import make
from tests.engine.backends.ranks.far_threads import divide, on_hosts, pages_of, require_only_own_parts
from tests.engine.backends.ranks.threads import SharedDriver
from tests.thorough import first_now, later

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

GREEDY = Sampling(temperature=0.0, max_tokens=6)


@pytest.mark.parametrize("share", [later("tp"), "pp"])
def test_another_host_gets_of_what_a_handoff_wrote_on_the_leads_host_the_part_that_it_reads(
    tmp_path: Path, share: str
) -> None:
    model = str(make(tmp_path, "qwen2"))
    alone = load_runner(EngineConfig(model, threads=1))
    widths = {share: 2}
    far = EngineConfig(model, threads=1, rank_bound_s=60.0, rank_hosts=("elsewhere:1",), **widths)
    one, runner = SharedDriver(alone, 16), on_hosts(alone.spec, far)
    try:
        many, prompt = SharedDriver(runner, 16), list(range(3, 48))
        for begin in (0, 5):  # the second prompt lands in the first one's pages
            pages = one._free[-4:][::-1]
            wanted = one.answer([prompt[begin:]], GREEDY)[0]
            many.memory.view()[:] = one.memory.view()
            assert continued(many, 10 + begin, prompt[begin:], pages) == wanted
        require_only_own_parts(runner)
    finally:
        runner.leave()


DIVIDED = [("qwen2", "pp", 2, 2), ("gpt_oss", "tp", 2, 2), ("gpt_oss-8", "pp", 3, 3), ("qwen2", "tp", 2, 2),
           ("deepseek_v2", "tp", 2, 2), ("qwen3", "tp3+pp2", 6, 3), ("mixtral", "ep", 2, 2),
           ("gpt_oss", "pp", 2, 2), ("gemma3n", "tp", 2, 2), ("gpt_oss", "ep", 2, 2)]  # fmt: skip


@pytest.mark.parametrize(("kind", "share", "count", "hosts"), first_now(DIVIDED, 3), ids=lambda value: str(value))
def test_pages_of_which_each_host_got_its_part_are_never_overwritten_and_made_whole_when_asked_for(
    tmp_path: Path, kind: str, share: str, count: int, hosts: int
) -> None:
    kind, _, layers = kind.partition("-")
    model = str(make(tmp_path, kind, **({"num_hidden_layers": int(layers)} if layers else {})))
    alone = load_runner(EngineConfig(model, threads=1, window_pages="auto"))
    elsewhere, own = ("elsewhere:1",) * (hosts - 1), "own" if alone.spec.layout.windows else "shared"
    far = EngineConfig(
        str(tmp_path), threads=1, rank_bound_s=60.0, rank_hosts=elsewhere, window_pages=own, **widths(share, count)
    )  # type: ignore[arg-type]
    tables = table_count(alone.spec.layout)
    one, runner = SharedDriver(alone, 16 * tables, chunk=44), on_hosts(alone.spec, far)
    try:
        many, prompt = SharedDriver(runner, 16 * tables), list(range(3, 48))
        held = runner._held
        assert held is not None
        pages = one._free[-4 * tables :][::-1]
        live, sequence = begun(one, prompt, 0, [*pages], None, [], [])
        one._step(live)
        divide(runner, one.memory.view())  # the prompt's; the ranks write what the answer adds to its last block
        wanted = ended(one, live, sequence)
        held.taken(pages)
        held.landed(10, pages, [block for block in range(4 * tables) if block % 4 < 3])
        assert continued(many, 10, prompt, pages) == wanted, "its first step was shown nothing"
        held.landed(11, list(pages), ())
        again = list(pages)  # another sequence that finds the blocks cached
        assert continued(many, 12, prompt, again) == wanted, "what only other hosts have wasn't written over"
        held.make_whole([page for page in pages if page < 3] + list(pages))
        size = runner.spec.layout.page_bytes
        for page in (page for at, page in enumerate(pages) if at % 4 < 3):
            span = slice(page * size, (page + 1) * size)
            assert bytes(many.memory.view()[span]) == bytes(one.memory.view()[span])
        held.taken(pages)
        assert held.show([]) == []
    finally:
        runner.leave()


def test_pages_that_no_descriptor_is_left_to_ask_for_cost_a_hit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = str(make(tmp_path, "qwen2"))
    spec = load_runner(EngineConfig(model, threads=1)).spec
    far = EngineConfig(model, threads=1, rank_bound_s=60.0, pp=2, rank_hosts=("elsewhere:1",))
    runner = on_hosts(spec, far)
    try:
        SharedDriver(runner, 16)
        held, pool = runner._held, PagePool(16)
        assert held is not None
        sharing, block = PageSharing(pool, held), b"b" * 32
        with pool.open((), 1) as lease:
            lease.seal(0, block)
            held.landed(10, lease.pages, [0])

        def full(*note: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        with monkeypatch.context() as scarce:
            scarce.setattr(notes, "put", full)
            assert not sharing.pin(ch.Pin(1, (block,))).pages
            assert not sharing.keep(ch.Keep(2, (block,))).hashes
        sharing.unkeep(ch.Unkeep(2))
        assert pool.snapshot_counts().leased == 0
        pool.check()
        assert len(sharing.pin(ch.Pin(3, (block,))).pages) == 1
        sharing.unpin(ch.Unpin(3))
    finally:
        runner.leave()


def test_a_state_is_lent_to_each_host_and_whole_again_for_the_step_that_reads_it(tmp_path: Path) -> None:
    model, prompt = str(make(tmp_path, "qwen3_next")), list(range(3, 48))
    alone = load_runner(EngineConfig(model, threads=1))
    far = EngineConfig(model, threads=1, rank_bound_s=60.0, tp=2, rank_hosts=("elsewhere:1",))
    one, runner = SharedDriver(alone, 16, chunk=44), on_hosts(alone.spec, far)
    try:
        many, count = SharedDriver(runner, 16, chunk=44), state_pages(alone.spec.layout)
        held, hosts = runner._held, runner._hosts
        assert held is not None
        pages, read, written = range(4), range(4, 4 + count), range(4 + count, 4 + 2 * count)
        live, sequence = begun(one, prompt, 0, [*pages], None, [*read], [*written])
        one._step(live)
        before = memoryview(bytes(one.memory.view()))
        wanted = ended(one, live, sequence)
        live, sequence = begun(many, prompt, 0, [*pages], None, [*read], [*written])
        many._step(live)
        held.lend(read)
        parts, size = (
            parts_of_hosts(runner._undivided, far.widths, 2, alone.spec.layout),
            alone.spec.layout.page_bytes,
        )
        theirs = pages_of(hosts.all[1].mapped)  # type: ignore[union-attr]
        for page in (*pages[:2], *read):
            span = slice(page * size, (page + 1) * size)
            assert gather(theirs[span], parts[1]) == gather(before[span], parts[1])
        divide(runner, before)
        held.taken([*pages, *read])
        held.landed(11, [*pages, *read], [0, 1, 2, *range(4, 4 + count)])
        live, sequence = begun(many, prompt, 44, [*pages], [*read], [*written], [*read])
        assert ended(many, live, sequence) == wanted
    finally:
        runner.leave()


Live = dict[int, tuple[SequenceState, list[int]]]


def begun(
    driver: SharedDriver, prompt: list[int], computed: int, pages: list[int], *states: list[int] | None
) -> tuple[Live, SequenceState]:
    """A sequence of which ``computed`` tokens are in ``pages``; its next steps read and write pages of state in
    turn: the first of ``states`` is read, then the others are written.
    """
    spec = driver.runner.spec
    sequence = SequenceState(
        11,
        EngineRequest("r", tuple(prompt), len(prompt), GREEDY, 0, ""),
        spec.eos_token_ids,
        spec.max_model_len,
        None,
    )
    sequence.computed = computed
    read, *written = states
    driver._states[11] = read, [*(written[0] or ())], [*(written[0] or ()), *(written[1] or ())]
    return {11: (sequence, pages)}, sequence


def ended(driver: SharedDriver, live: Live, sequence: SequenceState) -> list[int]:
    """Its answer, once it is complete."""
    while not sequence.finish_reason:
        for found in driver._step(live):
            sequence.append(found.token_id, found.logprobs)
    return sequence.tokens[sequence.request.prompt_tokens :]


def widths(share: str, count: int) -> dict[str, int]:
    """The settings of ``share``, as tp2+pp2; without numbers it is ``count`` wide."""
    if share.isalpha():
        return {share: count}
    return {each[:2]: int(each[2:]) for each in share.split("+")}


def continued(driver: SharedDriver, seq: int, prompt: list[int], pages: list[int]) -> list[int]:
    """The answer to a prompt of which all but the last token lies in ``pages`` already."""
    spec = driver.runner.spec
    request = EngineRequest(str(seq), tuple(prompt), len(prompt), GREEDY, 0, "")
    sequence = SequenceState(seq, request, spec.eos_token_ids, spec.max_model_len, None)
    sequence.computed = len(prompt) - 1
    driver._states[seq] = None, [], []
    while not sequence.finish_reason:
        for found in driver._step({seq: (sequence, pages)}):
            sequence.append(found.token_id, found.logprobs)
    return sequence.tokens[len(prompt) :]
