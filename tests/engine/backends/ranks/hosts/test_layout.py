"""Which rank of a worker runs on which host."""

from __future__ import annotations

from baton.engine.backends.ranks.hosts.layout import places_of_ranks
from baton.protos.channel import EngineReady
from baton.protos.nouns import KvLayout
from baton.worker.membership import describe
from baton.worker.spec import EngineSpec, WorkerSpec


def test_ranks_are_dealt_in_order_among_the_leads_host_and_the_others() -> None:
    assert places_of_ranks(4, ("a:1",)) == ("", "", "a:1", "a:1")
    assert places_of_ranks(5, ("a:1", "b:1")) == ("", "a:1", "a:1", "b:1", "b:1")
    assert places_of_ranks(2, ()) == ("", "")


def test_a_worker_of_one_rank_has_no_places() -> None:
    assert places_of_ranks(1, ()) == ()


def test_a_worker_tells_its_widths_and_where_each_rank_runs() -> None:
    ready = EngineReady(KvLayout("float32", (), 256, "float32"), "f", 16, 16, (), 1, 1)
    engine = EngineSpec(model="m", tp=2, pp=2, rank_hosts=("10.0.0.2:7100",))
    info = describe(WorkerSpec("w-0", "decode", "", engine=engine), ready, "i")
    assert info.widths == {"tp": 2, "pp": 2}
    assert info.rank_hosts == ("", "", "10.0.0.2:7100", "10.0.0.2:7100")
