"""/v1/cluster, its stream and its actions, on a real cluster that asks for keys."""

import json
from pathlib import Path

import httpx
import pytest

from baton.router.access.keys import add_key, revoke_key
from tests.router.dashboard.watched import bearer, until

STATIONS = {"queue", "prefill", "transfer", "first_decode", "ttft", "itl", "tpot", "e2e"}


def test_figures_are_for_admins_alone(watched):
    for path in ("/v1/cluster", "/v1/cluster/stream"):
        assert httpx.get(watched.url + path).status_code == 401
        assert httpx.get(watched.url + path, headers=bearer(watched.tenant)).status_code == 403
    refused = httpx.post(
        watched.url + "/v1/workers/decode-0/hold", json={"hold": "drain"}, headers=bearer(watched.tenant)
    )
    assert refused.status_code == 403
    assert watched.worker("decode-0")["hold"] is None


def test_a_snapshot_tells_the_whole_way_of_requests(watched):
    answer = watched.ask(tokens=120, output=8)
    assert answer.status_code == 200
    until(lambda: watched.snapshot()["recent"])
    found = watched.snapshot()
    assert {w["id"] for w in found["workers"]} == {"prefill-0", "decode-0", "decode-1"}
    assert found["pools"]["decode"]["ready"] == 2
    recent = found["recent"][0]
    assert recent["verdict"] == "met"
    assert {"queue", "prefill", "transfer", "first_decode"} <= recent["stations"].keys()
    until(lambda: watched.ask() and watched.context_class("short")["attainment"] is not None)  # it expires
    short = watched.context_class("short")
    assert short["attainment"] == 1.0
    assert short["goodput_per_s"] > 0
    assert all(short["seconds"][name]["p50"] > 0 for name in STATIONS)
    explained = watched.http.get(f"/v1/requests/{recent['request_id']}/explain")
    assert explained.json()["choices"][0]["prefill_worker"] == "prefill-0"


def test_an_slo_that_no_request_can_meet_is_missed(watched):
    until(lambda: watched.ask(tokens=300) and watched.context_class("long")["attainment"] is not None)
    assert watched.context_class("long")["attainment"] == 0.0


def test_workers_tell_what_they_do_and_what_they_could(watched):
    with watched.load(per_second=15):
        until(lambda: watched.worker("prefill-0")["mfu"])
        busy = watched.worker("prefill-0")
        flows = until(lambda: [f for f in watched.snapshot()["flows"] if f["transfers"] and f["bytes_per_s"]])
    assert 0 < busy["mfu"] <= 1.05
    assert busy["prefill_tokens_per_s"] > 0
    assert 0 < busy["in_steps"] <= 1
    assert busy["full"] is None or busy["full"] > 0
    assert {f["to"] for f in flows} <= {"decode-0", "decode-1"}
    assert all(f["failures"] == 0 and f["transport"] for f in flows)


def test_the_stream_brings_a_snapshot_a_second(watched):
    with watched.http.stream("GET", "/v1/cluster/stream") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        events = (json.loads(line[6:]) for line in stream.iter_lines() if line.startswith("data: "))
        first, second = next(events), next(events)
    assert 0.5 < second["at"] - first["at"] < 30


def test_the_stream_of_a_revoked_key_ends(watched):
    keys = Path(watched.cluster.config.router.keys_file)
    key = add_key(keys, "leaver", 0.0, admin=True)
    until(lambda: httpx.get(watched.url + "/v1/cluster", headers=bearer(key)).status_code == 200)
    with httpx.stream("GET", watched.url + "/v1/cluster/stream", headers=bearer(key), timeout=60) as stream:
        lines = stream.iter_lines()
        assert next(lines).startswith("data: ")
        revoke_key(keys, key.split("-")[1])
        assert sum(line.startswith("data: ") for line in lines) < 60, "it ends"
    assert httpx.get(watched.url + "/v1/cluster/stream", headers=bearer(key)).status_code == 401


def bring_work_to_decode_1(watched):
    """The other worker is held meanwhile, which may well carry it all."""
    watched.hold("decode-0", "drain")
    try:
        until(lambda: watched.worker("decode-1")["running"])
    finally:
        watched.hold("decode-0", "none")


@pytest.mark.parametrize("how", ["drain", "eject"])
def test_a_held_worker_gets_nothing_and_comes_back(watched, how):
    with watched.load(per_second=5, output=40) as statuses:
        bring_work_to_decode_1(watched)
        held = watched.hold("decode-1", how)
        assert held.json()["state"] == {"drain": "standby", "eject": "draining"}[how]
        until(lambda: watched.worker("decode-1")["running"] == 0)
        seen = watched.worker("decode-1")
        assert seen["hold"]["how"] == how
        assert seen["hold"]["by"] == "ops"
        assert watched.hold("decode-1", "none").json()["state"] == "ready"
        bring_work_to_decode_1(watched)
    assert statuses
    assert set(statuses) == {200}


def test_the_last_decode_worker_stays(watched):
    assert watched.hold("decode-0", "drain").status_code == 200
    try:
        assert watched.worker("decode-0")["hold"]["how"] == "drain"  # seen at once, whoever looked just before
        refused = watched.hold("decode-1", "eject")
        assert refused.status_code == 400
        assert "only decode worker" in refused.json()["error"]["message"]
    finally:
        watched.hold("decode-0", "none")


def test_bad_holds_are_refused_by_name(watched):
    unknown = watched.hold("decode-7", "drain")
    assert unknown.status_code == 404
    assert "decode-0" in unknown.json()["error"]["message"]
    assert watched.hold("decode-0", "melt").json()["error"]["param"] == "hold"


def test_another_sites_page_cannot_act(watched):
    path, body = "/v1/workers/decode-0/hold", b'{"hold": "drain"}'
    plain = watched.http.post(path, content=body, headers={"content-type": "text/plain"})
    assert plain.status_code == 400
    json_type = {"content-type": "application/json"}
    cross = watched.http.post(path, content=body, headers=json_type | {"sec-fetch-site": "cross-site"})
    assert cross.status_code == 403
    assert watched.worker("decode-0")["hold"] is None


def test_a_browser_that_opens_the_routers_own_address_comes_to_the_page(watched):
    page = httpx.get(watched.url, follow_redirects=True)
    assert page.status_code == 200
    assert page.url.path == "/dashboard/"
    assert "text/html" in page.headers["content-type"]


def test_the_pages_files_are_open_hold_no_data_and_load_nothing_else(watched):
    page = httpx.get(watched.url + "/dashboard", follow_redirects=True)
    assert page.status_code == 200
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    for name, kind in (("main.js", "text/javascript"), ("style.css", "text/css"), ("icon.svg", "image/svg+xml")):
        file = httpx.get(f"{watched.url}/dashboard/{name}")
        assert file.headers["content-type"].startswith(kind)
        assert "//" not in file.text.replace("http://www.w3.org/2000/svg", "").replace("// ", "")
    assert "<script>" not in page.text
    for name in ("nothing.js", "../app.py", "%2e%2e/app.py", "..%2fapp.py"):
        assert httpx.get(f"{watched.url}/dashboard/{name}").status_code in (401, 404)


def test_metrics_and_snapshot_agree(watched):
    watched.ask(tokens=90)
    text = httpx.get(watched.url + "/metrics", headers={"accept": "application/openmetrics-text"}).text
    assert text.endswith("# EOF\n")
    ended = sum(float(line.split()[1]) for line in text.splitlines() if line.startswith("baton_requests_total{"))
    assert ended >= sum(r["output_tokens"] > 0 for r in watched.snapshot()["recent"][:5])
    assert 'station="first_decode"' in text
    assert 'baton_slo_requests_total{context_class="short"' in text
