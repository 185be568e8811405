from pathlib import Path

import pytest
import redis as client

from baton.launch.redis_server import RedisServer, check_redis, find_server
from baton.process.processes import wait_exit
from baton.protos.errors import ConfigError, StartupError


def test_a_private_server_answers_on_its_socket_and_leaves_nothing_running(folder: Path) -> None:
    server = RedisServer(folder).start()
    pid = server.pid
    assert pid
    check_redis(server.url)
    with client.Redis.from_url(server.url) as connection:
        assert connection.config_get("port") == {"port": "0"}
    server.stop()
    assert wait_exit(pid, 30)
    assert server.pid is None


def test_the_embedded_server_is_taken_where_the_path_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert "valkey" in str(find_server())


def test_one_that_does_not_answer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"redis://127\.0\.0\.1:1 .*--redis"):
        check_redis("redis://127.0.0.1:1")


def test_a_server_that_does_not_start_shows_its_log(folder: Path) -> None:
    (folder / "redis.sock").mkdir()
    with pytest.raises(StartupError, match=r"redis\.log"):
        RedisServer(folder).start()
