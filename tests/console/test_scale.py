"""`baton scale`: what it takes, and whom it asks."""

import tempfile
from pathlib import Path

import redis
from typer.testing import CliRunner

from baton.console.main import app
from baton.console.scale import parse
from baton.deploy.redis_server import RedisServer

run = CliRunner().invoke


def test_numbers_are_read_and_others_refused_in_one_line() -> None:
    assert parse(["prefill=3", "decode=1"]) == {"prefill": 3, "decode": 1}
    for wrong in ("prefill", "prefill=x", "king=3", "decode=-1"):
        done = run(app, ["scale", wrong, "--redis", "unix:///nowhere"])
        assert done.exit_code == 1
        assert "give prefill=N, decode=N or both" in " ".join(done.output.split())


def test_without_waiting_it_only_asks() -> None:
    with tempfile.TemporaryDirectory(prefix="bt-") as folder:
        server = RedisServer(Path(folder)).start()
        try:
            done = run(app, ["scale", "prefill=3", "decode=2", "--redis", server.url, "--wait", "0"])
            assert done.exit_code == 0, done.output
            assert "prefill=3 decode=2, asked for" in done.output
            late = run(app, ["scale", "decode=4", "--redis", server.url, "--wait", "0.3"])
            assert late.exit_code == 1
            assert "not so after 0.3 s" in late.output
            assert redis.Redis.from_url(server.url).exists("{baton}:scale")
        finally:
            server.stop()
