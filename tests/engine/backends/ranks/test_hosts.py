"""Ranks on several hosts that share nothing but TCP: one rank's bits, whom a host obeys, what is lost."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.engine.backends.ranks.hosts.agent import RankAgent
from baton.engine.backends.ranks.hosts.control import Control, dial
from baton.engine.backends.ranks.hosts.lead import RemoteHost
from baton.engine.backends.ranks.hosts.links import RANK, TOKEN, HostMemory, Links, LinkServer
from baton.engine.backends.ranks.hosts.messages import HostShare
from baton.engine.backends.ranks.hosts.secured import rank_identity
from baton.engine.backends.ranks.link_plan import LinkPlan
from baton.engine.backends.ranks.memory import RanksStruct, show_pages
from baton.engine.backends.ranks.runner import RankRunner
from baton.engine.config import EngineConfig
from baton.engine.load import load_runner
from baton.kernels.abi import native
from baton.kernels.collective import oracle
from baton.kernels.collective.native import Collective, RankIsLost, group_at, group_bytes
from baton.kv.layout.extents import part_bytes, scatter
from baton.protos.errors import ConfigError, RankLost, StartupError
from baton.protos.nouns import AdapterLimits, Extent, Sampling
from baton.tls.identity import Identity
from tests.conformance.checkpoints import make
from tests.e2e.fleet import wait_for
from tests.engine.adapters.adapter_files import EVERYWHERE, EXPERTS, MIXTRAL, write
from tests.engine.adapters.test_equality import hold
from tests.engine.backends.ranks.other_host import children, other_host, serving_agent
from tests.engine.backends.ranks.same_bits import same_bits
from tests.engine.backends.ranks.threads import SharedDriver
from tests.thorough import first_now, later
from tests.tls.papers import files

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native kernels here")

GREEDY = Sampling(temperature=0.0, max_tokens=6)
PROMPTS = [[1, 2, 3], [4] * 40]
DEALT = [
    ("qwen3_next", "tp2+pp2", 4, 2), ("bamba", "tp", 2, 2),
    ("qwen2_mixed", "pp", 2, 2), ("qwen3", "tp3+pp2", 6, 3), ("mixtral", "ep", 2, 2), ("gemma2", "tp", 2, 2),
    ("mistral", "cp", 3, 2), ("qwen3_moe", "ep", 4, 3), ("gpt_oss", "tp", 2, 2), ("glm4_moe", "tp", 3, 3),
    ("mixtral", "tp2+pp2", 4, 2), ("olmo2", "tp", 4, 3), ("gpt_oss", "pp", 2, 2), ("phi3_long", "tp", 3, 3),
    ("deepseek_v3", "tp2+pp2", 4, 2), ("deepseek_v2", "pp", 2, 2),
    ("granite_hybrid", "tp3+pp2", 6, 3), ("qwen3_5", "pp", 2, 2), ("bamba", "pp", 3, 3), ("qwen3_next", "tp", 2, 2),
    ("gemma3n", "pp", 3, 3), ("gemma3n", "tp2+pp2", 4, 4), ("gemma3n", "tp", 2, 2), ("gemma3n", "cp", 2, 2),
    ("llama3", "tp2+pp2", 4, 4), ("qwen3_moe", "pp", 2, 2), ("olmo2", "pp", 3, 3), ("gemma3", "tp2+pp2", 4, 3),
]  # fmt: skip
FORMS = [{"quantization": "int4", "kv_cache_dtype": "int8"}, {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}]
KEY = b"a key of enough bytes"
HEAD = "<iiqqqq"  # links.cpp: LinkHead


@pytest.mark.parametrize(("kind", "share", "count", "hosts"), first_now(DEALT, 5), ids=lambda value: str(value))
def test_ranks_of_several_hosts_have_the_bits_of_one(
    tmp_path: Path, kind: str, share: str, count: int, hosts: int
) -> None:
    same_bits(make(tmp_path, kind), count, share, chunk=170, hosts=hosts)


@pytest.mark.parametrize("fields", first_now(FORMS, 1), ids=lambda fields: "-".join(fields.values()))
def test_narrow_kv_of_another_hosts_heads_has_the_bits_of_one_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: dict[str, str]
) -> None:
    monkeypatch.setenv("BATON_CACHE_DIR", str(Path(native.built(native.isa())).parents[1]))
    for share in ("tp", "pp"):
        cache = str(tmp_path / "cache")
        same_bits(make(tmp_path / "model", "qwen2_mixed"), 2, share, hosts=2, cache_dir=cache, **fields)


def require_brought_back(runner: RankRunner, driver: SharedDriver) -> None:
    """Asserts that what only another host's processes have of pages comes to the lead's when they are whole."""
    held, size, whole = runner._held, runner.spec.layout.page_bytes, bytes(driver.memory.view())
    assert held is not None
    part = held._missed[1]
    if not part:
        return  # the lead's pages have all
    pages = [at for at in range(16) if any(whole[at * size : (at + 1) * size])]
    for page in pages:
        scatter(memoryview(bytes(part_bytes(part))), driver.memory.page(page), part)
    held.landed(99, pages, range(len(pages)))
    assert bytes(driver.memory.view()) != whole
    held.make_whole(pages)
    assert bytes(driver.memory.view()) == whole


class FarGroup:
    """A group of one rank per host, each with memory of its own."""

    def __init__(
        self,
        count: int,
        bound_s: float = 60.0,
        slot_bytes: int = 4096,
        strangers: int = 0,
        identity: Identity | None = None,
    ) -> None:
        size = group_bytes(count, slot_bytes)
        self._maps = [mmap.mmap(-1, size) for _ in range(count)]
        self.at = [ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in self._maps]
        self.servers = [LinkServer("127.0.0.1", identity) for _ in range(count)]
        addresses = tuple(server.address for server in self.servers)
        self.plan = LinkPlan(os.urandom(32), addresses, tuple(range(count)))
        for rank, server in enumerate(self.servers):
            server.start(self.plan, rank, HostMemory(self.at[rank], size, self.at[rank], 0, (self._maps,)))
        self.strangers = [socket.create_connection(at, 30) for at in addresses for _ in range(strangers)]
        self.ranks = [
            Links(self.plan, rank, self.at[rank], self.at[rank], bound_s, identity) for rank in range(count)
        ]
        self.collectives = [
            Collective(group_at(self.at[rank], rank, count, slot_bytes, bound_s)) for rank in range(count)
        ]
        for collective, links in zip(self.collectives, self.ranks, strict=True):
            collective.group.links = links.address

    def together(self, work: Callable[[Collective, int], object]) -> None:
        threads = [threading.Thread(target=work, args=(each, rank)) for rank, each in enumerate(self.collectives)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()

    def close(self) -> None:
        for links, server in zip(self.ranks, self.servers, strict=True):
            links.close()
            server.close()
        for server in self.servers:
            server.join(30)
        for stranger in self.strangers:
            stranger.close()


@pytest.mark.parametrize("encrypted", [False, True])
def test_collectives_of_ranks_on_several_hosts_are_those_of_the_oracle(encrypted: bool) -> None:
    count, n, made = 3, 1500, torch.Generator().manual_seed(1)  # more than a slot holds
    parts = [torch.randn(n, generator=made) * 10.0**rank for rank in range(count)]
    whole = [torch.randn(count, n, generator=made) for _ in range(count)]
    summed, gathered = [part.clone() for part in parts], [torch.zeros(count * n) for _ in parts]
    exchanged = [torch.zeros(count, n) for _ in parts]

    def work(collective: Collective, rank: int) -> None:
        for _ in range(3):
            summed[rank].copy_(parts[rank])
            collective.all_reduce(summed[rank].data_ptr(), n)
        collective.all_gather(parts[rank].data_ptr(), n, gathered[rank].data_ptr())
        collective.all_to_all(whole[rank].data_ptr(), n, exchanged[rank].data_ptr())
        collective.meet()

    group = FarGroup(count, identity=rank_identity(files("worker"), "a port") if encrypted else None)
    group.together(work)
    group.close()
    for rank in range(count):
        assert torch.equal(summed[rank], oracle.all_reduce(parts))
        assert torch.equal(gathered[rank], oracle.all_gather(parts))
        assert torch.equal(exchanged[rank], oracle.all_to_all(whole, rank))


@pytest.mark.parametrize("at", [-8, 1 << 40, 4096])
def test_a_write_beyond_the_memory_ends_the_connection_and_its_rank_is_lost(at: int) -> None:
    memory = mmap.mmap(-1, size := group_bytes(2, 128))
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    server = LinkServer("127.0.0.1")
    plan = LinkPlan(os.urandom(32), (server.address, ("127.0.0.1", 1)), (0, 1))
    server.start(plan, 0, HostMemory(address, size, address, 0, (memory,)))
    with socket.create_connection(server.address, 30) as stranger:
        stranger.sendall(bytes(32) + (1).to_bytes(4, "little"))
        assert stranger.recv(1) == b""  # it hasn't the worker's token
    with socket.create_connection(server.address, 30) as rank:
        rank.sendall(plan.token + (1).to_bytes(4, "little"))
        assert rank.recv(1) == b"1"
        rank.sendall(struct.pack(HEAD, 0, 0, at, 1, size, size) + bytes(size))
        server.join(30)  # its reader has ended, though the connection hasn't
    server.close()
    assert int.from_bytes(memory[:4], "little") == 1 + 1
    assert not any(memory[4:])


def test_nothing_is_sent_behind_a_message_that_went_out_in_part() -> None:
    size = group_bytes(2, 128) + (64 << 20)
    memory = mmap.mmap(-1, size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        dial = threading.Thread(target=lambda: made.append(Links(plan, 0, address, address, 0.2)))
        plan, made = LinkPlan(bytes(32), (("127.0.0.1", 1), listener.getsockname()), (0, 1)), list[Links]()
        dial.start()
        far, _ = listener.accept()
        with far:
            far.settimeout(30)
            far.recv(TOKEN + RANK, socket.MSG_WAITALL)
            far.sendall(b"1")
            dial.join(30)
            group = group_at(address, 0, 2, 128, 0.2)
            group.links = made[0].address
            ranks = RanksStruct(group=group, pages=address)
            for _ in range(2):  # more than the sockets hold, and nobody reads
                show_pages(ranks, 1, [0], size, (Extent(0, size, 0, 1),))
            read = 0
            while got := len(far.recv(1 << 20)):  # the connection has ended
                read += got
        made[0].close()
    assert 0 < read < size
    lost = RankIsLost(int.from_bytes(memory[:4], "little"))
    assert (lost.rank, lost.stuck) == (1, True)


def test_a_host_obeys_and_a_lead_trusts_only_whoever_has_the_key(tmp_path: Path) -> None:
    own, other = tmp_path / "key", tmp_path / "other"
    own.write_bytes(KEY)
    other.write_bytes(KEY[::-1])
    with serving_agent(key_file=str(own)) as agent:
        with pytest.raises(StartupError, match=r"rank_key_file isn't this one's"):
            dial(agent.address, other.read_bytes(), "worker.rank_hosts")
        assert agent._sessions == []
        dial(agent.address, KEY, "worker.rank_hosts").close()
        wait_for(lambda: len(agent._sessions) == 0 or agent._sessions[0].poll() is not None)
    with pytest.raises(StartupError, match=r"no `baton ranks` answers at"):
        dial(agent.address, KEY, "worker.rank_hosts")
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0: ranks of other hosts need a key"):
        RankAgent("0.0.0.0:0")
    for wrong in ("localhost", "127.0.0.1:x", "127.0.0.1:\N{SUPERSCRIPT TWO}", "127.0.0.1:65536"):
        with pytest.raises(ConfigError, match="host:port"):
            RankAgent(wrong)
        with pytest.raises(ConfigError, match="host:port"):
            dial(wrong, KEY, "worker.rank_hosts")
    for nobody in ("a..b:1", "[::zz]:1"):
        with pytest.raises(ConfigError, match="--listen"):
            RankAgent(nobody)
        with pytest.raises((ConfigError, StartupError), match=r"worker\.rank_hosts"):
            dial(nobody, KEY, "worker.rank_hosts")


def test_a_host_that_goes_while_its_lead_makes_the_pages_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(self: Control, message: object) -> None:
        raise BrokenPipeError("Broken pipe")

    with serving_agent() as agent:
        config = EngineConfig("model", pp=2, rank_hosts=(agent.address,))
        host = RemoteHost(config, 1, agent.address, b"")
        try:
            monkeypatch.setattr(Control, "send", gone)
            with pytest.raises(StartupError, match=f"the ranks at {agent.address} are gone: Broken pipe"):
                host.tell(HostShare(4096, 4096, LinkPlan(b"", (), ())))
        finally:
            host.control.close()


def test_strangers_on_a_port_of_links_delay_no_rank() -> None:
    group = FarGroup(2, strangers=2)
    group.together(lambda collective, rank: collective.meet())
    group.close()
    assert [collective.group.turn for collective in group.collectives] == [1, 1]


def test_hosts_that_cannot_share_a_model_are_refused_with_what_works(tmp_path: Path) -> None:
    model, far = str(make(tmp_path, "mixtral")), ("127.0.0.1:1", "127.0.0.1:2")
    with pytest.raises(ConfigError, match="names 2 hosts beside the worker's own, and it has 1 ranks"):
        load_runner(EngineConfig(model, rank_hosts=far))
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="a key has 16 bytes or more"):
        load_runner(EngineConfig(model, pp=2, rank_hosts=far[:1], rank_key_file=str(tmp_path / "key")))


@pytest.mark.parametrize(
    ("victim", "number", "said", "share"),
    [
        ("rank", signal.SIGKILL, r"rank 1 ended by itself \(signal 9\), of 2 ranks", "pp"),
        later("session", signal.SIGKILL, r"rank 1 is gone", "pp"),
        later("rank", signal.SIGSTOP, "rank 1 is stuck", "pp"),
        later("rank", signal.SIGKILL, r"rank 1 ended by itself \(signal 9\), of 2 ranks", "ep"),
        later("rank", signal.SIGSTOP, "rank 1 is stuck", "ep"),
    ],
)
def test_a_worker_of_two_hosts_answers_as_one_and_ends_when_the_other_hosts_rank_does(
    tmp_path: Path, victim: str, number: signal.Signals, said: str, share: str
) -> None:
    model = str(make(tmp_path, "qwen2" if share == "pp" else "mixtral"))
    alone = SharedDriver(load_runner(EngineConfig(model, threads=1)), 16).answer(PROMPTS, GREEDY)
    heard, told = threading.Event(), list[RankLost]()
    with other_host() as (address, agent):
        bound_s = 60.0 if number is signal.SIGKILL else 5.0
        far = {share: 2, "rank_bound_s": bound_s, "rank_hosts": (address,)}
        runner = load_runner(EngineConfig(model, threads=1, **far))  # type: ignore[arg-type]
        assert isinstance(runner, RankRunner)
        try:
            driver = SharedDriver(runner, 16)
            assert driver.answer(PROMPTS, GREEDY) == alone
            require_brought_back(runner, driver)
            assert driver.answer(PROMPTS, GREEDY) == alone
            runner.watch(lambda error: (told.append(error), heard.set()))
            session = children(agent)[0]
            os.kill(session if victim == "session" else children(session)[0], number)
            assert number is signal.SIGSTOP or heard.wait(60)
            with pytest.raises(RankLost, match="rank 1 is"):
                driver.answer(PROMPTS, GREEDY)
        finally:
            runner.leave()
        wait_for(lambda: not children(agent))
    if number is not signal.SIGSTOP:
        assert told[0].rank == 1
        assert said.split(r" \(")[0].split(",")[0] in told[0].message or victim == "session"


@pytest.mark.thorough
def test_an_adapter_reaches_the_ranks_of_another_host(tmp_path: Path) -> None:
    model, targets = make(tmp_path / "model", "mixtral"), (*EVERYWHERE, EXPERTS, *MIXTRAL)
    adapter, limits = write(tmp_path / "adapter", model, targets), AdapterLimits(2, 1 << 30, 64)
    alone = load_runner(EngineConfig(str(model), threads=1, adapters=limits))
    with other_host() as (address, _):
        far = EngineConfig(str(model), threads=1, ep=2, rank_bound_s=60.0, rank_hosts=(address,), adapters=limits)
        runner = load_runner(far)
        assert isinstance(runner, RankRunner)
        try:
            found = []
            for each in (alone, runner):
                driver = SharedDriver(each, 16)
                found.append(driver.answer(PROMPTS, GREEDY, adapters=[hold(each, "a", adapter), ""]))
            assert found[0] == found[1]
        finally:
            runner.leave()
