"""`baton top`, of snapshots as a router gives them."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from prometheus_client import CollectorRegistry
from rich.console import Console
from typer.testing import CliRunner

from baton.cluster.config import ContextClassSection
from baton.cluster.metering.telemetry import RouterMetrics
from baton.console.cluster.top import page
from baton.console.main import app
from baton.protos.measurements import WorkerLoad
from baton.protos.nouns import KvLayout, WorkerInfo
from baton.router.observe.live import ClassWindow, LiveStats, bin_of
from baton.router.observe.overview import Overview, Prices, RouterFacts, TrafficSources, WorkerSources
from baton.router.observe.tallies import Tallies
from baton.router.request.environment import Environment
from tests.router.ends import ended


class ListedWorker:
    def __init__(self, name: str, role: str, **fields) -> None:
        layout = KvLayout("uint8", (), 16, "paced")
        self.info = WorkerInfo(
            name, "i", role, "127.0.0.1:1", "m", "f", layout, 4096, 100, (), 1000, max_batch=16, **fields
        )
        self.load = WorkerLoad(running=4, waiting=2, free_pages=300, cached_pages=200, leased_pages=500, busy=0.75)
        self.age_s = 0.2


class Roster:
    def snapshot(self):
        held = ListedWorker("decode-1", "decode", state="standby")
        return {
            s.info.worker_id: s
            for s in (ListedWorker("prefill-0", "prefill"), ListedWorker("decode-0", "decode"), held)
        }


@pytest.fixture
async def snapshot():
    metrics = RouterMetrics(CollectorRegistry())
    live = LiveStats(lambda: 100.0, metrics.asked.now)
    tallies = Tallies(metrics, live, lambda: 100.0)
    tallies.fold()
    for n, verdict in enumerate(("met", "missed")):
        stations = {"queue": 0.01, "prefill": 0.08, "transfer": 0.002, "first_decode": 0.01}
        over = ended(
            at=50.0, request_id=f"request-{n}", prefill="prefill-0", decode="decode-0", cached_tokens=50,
            output_tokens=20, duration_s=0.6, stations=stations, verdict=verdict,
        )  # fmt: skip
        tallies.of("m", "short").requests.append("stop")
        tallies.ended(tallies.of("m", "short"), over, b"")
        live.add(20, "short", ClassWindow({}, {"itl": {bin_of(0.02): 19}}))
    live.refused("short", missed=1)
    workers = WorkerSources(
        Roster(),
        lambda: dict.fromkeys(("prefill-0", "decode-0", "decode-1"), "i"),
        fullness=lambda info, load: 0.09 if info.role == "decode" else None,
    )
    router = {"model": "demo", "policy": "cost", "processes": 1}
    facts = RouterFacts(router, [ContextClassSection(name="short", slo_ttft_s=0.2)], Prices(2.0, 1.0))
    environment = Environment(lambda: 200.0, lambda: 60.0)
    return await Overview(workers, TrafficSources(live, lambda: {"short": 3}), facts, environment).snapshot()


def test_a_snapshot_adds_up(snapshot):
    short = snapshot["classes"][0]
    assert short["attainment"] == pytest.approx(1 / 3)
    assert short["waiting"] == 3
    assert snapshot["router"]["model"] == "m"  # what is served, whatever the router's own setting names
    assert snapshot["pools"]["decode"] == {
        "workers": 2, "ready": 1, "running": 8, "waiting": 4, "kv_usage": 0.5, "full": 0.09,
        "prefill_tokens_per_s": 0.0, "decode_tokens_per_s": 0.0,
    }  # fmt: skip
    cost = snapshot["totals"]["cost"]
    assert cost["dollars_per_hour"] == 4.0
    assert cost["per_million_input"] == pytest.approx(2 / 3600 / (200 / snapshot["window_s"]) * 1e6)
    assert cost["per_million_output"] == pytest.approx(2 / 3600 / (40 / snapshot["window_s"]) * 1e6)


@pytest.mark.parametrize("width", [80, 140])
def test_the_page_names_every_worker_and_class(snapshot, width):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(page(snapshot, width))
    text = console.export_text()
    for name in ("prefill-0", "decode-0", "short", "50%"):
        assert name in text
    assert "TTFT p50" in text
    assert " 9%" in text  # how full it is, beside 75% of its time in steps
    assert "75%" not in text
    assert ("transfer" in text) == (width >= 120)
    assert "request-0" in text
    assert ("to the first token" in text) == (width >= 120)
    if width > 80:
        assert "decode-1 (standby)" in text


@pytest.fixture
def router(snapshot):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers["authorization"] == "Bearer good"
            body = snapshot if allowed else {"error": {"message": "give an API key"}}
            self.send_response(200 if allowed else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_the_page_says_for_how_long_redis_is_away_and_who_cannot_hand_over(snapshot):
    def shown(found):
        console = Console(width=140, highlight=False, force_terminal=False)
        with console.capture() as got:
            console.print(page(found, 140))
        return got.get()

    assert "Redis" not in shown(snapshot)
    assert "Redis is away for 12 s" in shown(snapshot | {"redis": {"away_s": 12.0}})
    earlier = {key: value for key, value in snapshot.items() if key not in ("redis", "obstacles")}
    assert "Redis" not in shown(earlier)
    obstacle = {"sender": "prefill-0", "receiver": "", "why": "no weights of its own"}
    assert "prefill-0 can't hand over to any decode worker: no weights" in shown(
        earlier | {"obstacles": [obstacle]}
    )


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(12.34, "12.3/s in"), (999.7, "1k/s in"), (123456.0, "123k/s in"), (1234567.0, "1.23M/s in")],
)
def test_large_numbers_are_shown_in_units_and_never_in_powers_of_ten(snapshot, rate, shown):
    totals = snapshot["totals"] | {"input_tokens_per_s": rate}
    slow = snapshot["recent"][0] | {"ttft_s": 1234.0}
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(page(snapshot | {"totals": totals, "recent": [slow]}, 160))
    text = console.export_text()
    assert shown in text
    assert "1234 s" in text
    assert "e+" not in text


def test_once_and_json_end_by_themselves(router):
    run = CliRunner().invoke
    shown = run(app, ["top", "--once", "--url", router, "--key", "good"])
    assert shown.exit_code == 0
    assert "goodput" in shown.output
    plain = run(app, ["top", "--json", "--url", router, "--key", "good"])
    assert json.loads(plain.output)["queues"] == [{"class": "short", "waiting": 3}]


def test_a_missing_key_and_a_missing_router_are_one_line(router):
    run = CliRunner().invoke
    refused = run(app, ["top", "--once", "--url", router])
    assert refused.exit_code == 1
    assert "give an API key" in refused.output
    nobody = run(app, ["top", "--once", "--url", "http://127.0.0.1:9"])
    assert nobody.exit_code == 1
    assert "pass --url" in nobody.output


def test_adapters_are_shown_with_their_content_and_how_many_hold_them(snapshot):
    many = [
        {
            "name": f"a{at}",
            "adapter_id": f"a{at}@{at:016x}",
            "tenant": "[x]",
            "pinned": at == 3,
            "workers": ["d"] * at,
        }
        for at in range(10)
    ]
    console = Console(width=140, record=True)
    console.print(page(snapshot | {"adapters": [*many, {**many[0], "name": "new", "adapter_id": ""}]}, 140))
    text = console.export_text()
    assert "a9" in text.split("0000000000000009")[0].split("\n")[-1]
    assert "and 3 more" in text
    assert "[x]" in text
    console.print(page(snapshot | {"adapters": []}, 140))
    assert "content" not in console.export_text()
