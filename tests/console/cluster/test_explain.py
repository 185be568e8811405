"""``baton explain`` shows what was asked, where it was placed and why, and what each station took."""

from __future__ import annotations

import io

import msgspec
import pytest
from rich.console import Console

from baton.console.cluster import explain
from baton.console.cluster.explain import page
from baton.protos.errors import Overloaded, PoolExhausted, RequestUnknown
from baton.protos.nouns import KvLayout, Sampling, WorkerInfo
from baton.router.observe.decisions import DecisionRecord
from baton.router.observe.trail import Trail, ranks_of
from baton.router.policies import Option, RoutingDecision
from baton.router.request.context import RequestContext
from baton.router.request.request import ChoiceSummary, RouterRequest


@pytest.fixture
def record() -> DecisionRecord:
    context = RequestContext(asked_id="mine", slo_ttft_s=0.5)
    request = RouterRequest("r", "m", (1, 2), Sampling(max_tokens=30), context=context)
    return DecisionRecord(request, "short", "router", 0.0)


def shown(record: DecisionRecord) -> str:
    out = io.StringIO()
    page(record.plain(), Console(file=out, width=140, highlight=False))
    return out.getvalue()


def trail(record: DecisionRecord, attempts: int) -> Trail:
    made = Trail(0, ChoiceSummary(prompt_tokens=2, attempts=attempts))
    record.trails.append(made)
    return made


def test_what_was_asked_is_said(record: DecisionRecord) -> None:
    assert "r: m, 2 prompt tokens, at most 30 to write, class short, x-request-id mine" in shown(record)
    assert "first token wanted within 0.5 s" in shown(record)


def test_the_adapter_that_answers_is_named_with_its_content(record: DecisionRecord) -> None:
    adapter = "sql@0123456789abcdef"
    context = msgspec.structs.replace(record.request.context, adapter_id=adapter)
    asked = msgspec.structs.replace(record.request, context=context)
    assert f"r: m with adapter {adapter}, 2 prompt tokens" in shown(DecisionRecord(asked, "short", "router", 0.0))
    assert "adapter" not in shown(record)


def test_each_station_is_shown_whatever_the_policy_predicts(record: DecisionRecord) -> None:
    made = trail(record, 2)
    ways = tuple(Option("prefill", f"d{at}", "p0", {"load": float(at)}) for at in range(2))
    made.placed(RoutingDecision("least_loaded", ways[0], ways), 0.1, 0.0, "float32 1234")
    made.left(f"d0: {PoolExhausted.label}: no page is left")
    made.summary.stations |= {"queue": 0.25, "decode": 7.5}
    made.over = True
    text = shown(record)
    assert "2 attempts" in text
    assert "weights float32 1234; given up because of d0: pool_exhausted: no page is left" in text
    assert "observed seconds: queue 0.2500, decode 7.5000" in text
    assert "policies/least_loaded.md" in text


def test_the_ranks_of_a_workers_hosts_are_named_where_a_request_was_placed(record: DecisionRecord) -> None:
    taken, layout = Option("prefill", "d0", "p0", {}), KvLayout("float32", (), 256, "float32")
    one = WorkerInfo("d0", "i", "decode", "10.0.0.3:1", "m", "f", layout, 16, 16, (), 1)
    wide = msgspec.structs.replace(one, worker_id="p0", widths={"pp": 3}, rank_hosts=("", "", "10.0.0.2:7100"))
    decision = RoutingDecision("cost", taken, (taken,))
    trail(record, 1).placed(decision, 0.1, 0.0, ranks=ranks_of({"p0": wide, "d0": one}))
    [placement] = record.plain()["choices"][0]["placements"]
    assert placement["ranks"] == {"p0": {"widths": {"pp": 3}, "hosts": ("", "", "10.0.0.2:7100")}}
    assert "p0: pp 3, ranks 0-1 on its own host, rank 2 on 10.0.0.2:7100" in shown(record)


def test_a_choice_that_was_never_placed_says_so_and_why(record: DecisionRecord) -> None:
    trail(record, 0).failed(Overloaded("the queue is full"))
    text = shown(record)
    assert "never placed, overloaded: the queue is full" in text
    assert "baton/router/policies" not in text


class Endpoint:
    """Answers a console's calls of a router whose last requests are ``recent``."""

    def __init__(self, recent: list[dict[str, object]], record: object) -> None:
        self.paths: list[str] = []
        self._recent, self._record = recent, record

    def call(self, method: str, path: str) -> object:
        self.paths.append(path)
        return {"recent": self._recent} if path == "/v1/cluster" else self._record


def test_without_an_id_the_request_that_ended_last_is_explained(
    record: DecisionRecord, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoint = Endpoint([{"at": 1.0, "request_id": "old"}, {"at": 2.0, "request_id": "new"}], record.plain())
    monkeypatch.setattr(explain, "router", lambda url, key: endpoint)
    assert explain.show("", None, "", False) == 0
    assert endpoint.paths == ["/v1/cluster", "/v1/requests/new/explain"]
    assert "2 prompt tokens" in capsys.readouterr().out


def test_without_an_id_a_cluster_that_was_never_asked_says_so(
    record: DecisionRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "router", lambda url, key: Endpoint([], record.plain()))
    with pytest.raises(RequestUnknown, match="no request has ended here yet"):
        explain.show("", None, "", False)
