"""`baton keys` and `baton explain`, as a person types them."""

import http.server
import json
import threading

import pytest
from typer.testing import CliRunner

from baton.console.main import app

run = CliRunner().invoke


def test_a_key_is_added_listed_and_revoked(tmp_path):
    path = str(tmp_path / "keys.json")
    added = run(app, ["keys", "add", "acme", "--name", "ci", "--rpm", "60", "--file", path])
    key = added.stdout.strip()
    assert added.exit_code == 0
    assert key.startswith("bt-")
    listed = run(app, ["keys", "list", "--file", path]).output
    assert "acme" in listed
    assert "open" in listed
    assert key not in listed
    assert run(app, ["keys", "revoke", key.split("-")[1], "--file", path]).exit_code == 0
    assert "revoked" in run(app, ["keys", "list", "--file", path]).output
    assert run(app, ["keys", "revoke", "nobody", "--file", path]).exit_code == 1
    assert run(app, ["keys", "list", "--file", str(tmp_path / "none.json")]).exit_code == 1


RECORD = {
    "request_id": "abc", "tenant": "", "model": "m", "context_class": "short", "prompt_tokens": 40, "state": "over",
    "choices": [
        {
            "choice": 0, "completion_tokens": 8, "cached_tokens": 7, "attempts": 2, "finish_reason": "length",
            "error": "",
            "placements": [
                {
                    "at_s": 0.1, "waited_s": 0.05, "policy": "cost", "left_for": "d0: worker_lost: gone",
                    "not_listed": 3,
                    "taken": {"way": "prefill", "prefill": "p0", "decode": "d0", "cost": 0.5,
                              "cached_tokens": 16, "terms": {"queue": 0.2, "read": 0.3}},
                    "not_taken": [{"way": "local", "prefill": "", "decode": "d1", "cost": 0.9,
                                   "cached_tokens": 0, "terms": {"queue": 0.9}}],
                }
            ],
            "predicted_against_observed": {"ttft": {"predicted_s": 0.61, "observed_s": None}},
        }
    ],
}  # fmt: skip


class Router(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        known = self.path == "/v1/requests/cmpl-abc/explain"
        body = RECORD if known else {"error": {"message": "no record of it"}}
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def url():
    with http.server.HTTPServer(("127.0.0.1", 0), Router) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_explain_shows_the_road_not_taken_and_what_was_observed(url):
    shown = run(app, ["explain", "cmpl-abc", "--url", url])
    assert shown.exit_code == 0
    for part in (
        "abc",
        "taken",
        "p0",
        "d0",
        "0.5000",
        "local",
        "d1",
        "0.9000",
        "worker_lost",
        "and 3 more",
        "0.6100",
    ):
        assert part in shown.output
    assert json.loads(run(app, ["explain", "cmpl-abc", "--url", url, "--json"]).output) == RECORD
    assert run(app, ["explain", "other", "--url", url]).exit_code == 1
