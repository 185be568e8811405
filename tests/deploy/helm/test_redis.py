"""The chart's Redis asks for its password and takes up a renewed certificate; its own command runs here."""

from __future__ import annotations

import os
import shutil
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.retry import Retry

from baton.launch.ports import free_ports
from baton.launch.redis_server import find_server
from tests.deploy.helm.charts import one, render

needs_redis = pytest.mark.skipif(
    shutil.which("redis-cli") is None or shutil.which("redis-server") is None, reason="no redis-cli here"
)
REFUSES_ONCE = """#!/bin/sh
echo >> "$CALLS"
[ "$(wc -l < "$CALLS")" = 1 ] && echo "ERR Unable to update TLS configuration" || echo OK
"""
MOUNT = "/etc/baton/tls"


def redis_container() -> dict[str, Any]:
    values = {"tls": {"mode": "secret", "existingSecrets": {role: role for role in ("router", "worker", "redis")}}}
    [container] = one(render(values), "StatefulSet", "demo-baton-redis")["spec"]["template"]["spec"]["containers"]
    return container


def test_redis_is_told_again_of_a_certificate_that_it_refused(tmp_path: Path) -> None:
    """The real client ends with 0 whatever Redis answers."""
    container, calls = redis_container(), tmp_path / "calls"
    for name, text in (("redis-cli", REFUSES_ONCE), ("redis-server", "#!/bin/sh\necho up\nexec sleep 60\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o700)
    for name in ("tls.crt", "tls.key", "ca.crt"):
        (tmp_path / name).write_text("first")
    calls.touch()
    script = container["args"][0].replace(MOUNT, str(tmp_path)).replace("/data", str(tmp_path))
    path = f"{tmp_path}:{os.environ['PATH']}"
    env = {"PATH": path, "CALLS": str(calls), "REDIS_PASSWORD": "x", "RENEWED_EVERY_S": "0.05"}
    process = subprocess.Popen(
        [*container["command"], script], env=env, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "up"
        (tmp_path / "tls.crt").write_text("renewed")
        said = [process.stdout.readline().strip() for _ in range(2)]
    finally:
        os.killpg(process.pid, 9)
        process.wait()
    assert said == ["a renewed certificate: ERR Unable to update TLS configuration", "a renewed certificate: OK"]


def certs(command: str, folder: Path) -> None:
    made = subprocess.run(
        [sys.executable, "-m", "baton", "certs", command, str(folder)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr


def mounted(made: Path, mount: Path) -> None:
    """Puts the router's certificate where the pod has Redis's; the names in it don't matter here."""
    for source, name in (("ca.crt", "ca.crt"), ("router.key", "tls.key"), ("router.crt", "tls.crt")):
        shutil.copy(made / source, mount / name)


def shown(port: int, mount: Path) -> bytes:
    """The certificate that Redis shows; b"" while it can't be reached."""
    context = ssl.create_default_context(cafile=str(mount / "ca.crt"))
    context.check_hostname = False
    context.load_cert_chain(mount / "tls.crt", mount / "tls.key")
    try:
        with socket.create_connection(("127.0.0.1", port), 5) as raw, context.wrap_socket(raw) as found:
            return found.getpeercert(binary_form=True) or b""
    except OSError:
        return b""


@needs_redis
def test_redis_shows_a_renewed_certificate_without_a_restart(tmp_path: Path) -> None:
    made, mount, data = (tmp_path / name for name in ("made", "tls", "data"))
    mount.mkdir()
    data.mkdir()
    certs("make", made)
    mounted(made, mount)
    container = redis_container()
    [port] = free_ports(1)
    script = container["args"][0].replace(MOUNT, str(mount)).replace("/data", str(data))
    script = script.replace("-p 6379", f"-p {port}").replace("--tls-port 6379", f"--tls-port {port}")
    script = script.replace("'* -::*'", "127.0.0.1")
    env = os.environ | {"REDIS_PASSWORD": "x", "REDISCLI_AUTH": "x", "RENEWED_EVERY_S": "0.2"}
    process = subprocess.Popen([*container["command"], script], env=env, start_new_session=True)
    try:
        until, first = time.monotonic() + 60, b""
        while not first and time.monotonic() < until:
            first = shown(port, mount)
            time.sleep(0.1)
        certs("renew", made)
        mounted(made, mount)
        while (now := shown(port, mount)) in (b"", first) and time.monotonic() < until:
            time.sleep(0.1)
        assert first
        assert now not in (b"", first), "it still shows the certificate of its start"
        assert process.poll() is None
    finally:
        os.killpg(process.pid, 9)
        process.wait()


@pytest.mark.parametrize("password", ["plain", "a q\"uo'te, back\\slash $HOME `id` #%s"])
def test_redis_asks_for_the_password_of_the_secret_whatever_is_in_it(tmp_path: Path, password: str) -> None:
    (tmp_path / "redis-server").symlink_to(find_server())
    [container] = one(render({}), "StatefulSet", "demo-baton-redis")["spec"]["template"]["spec"]["containers"]
    [port] = free_ports(1)
    script = container["args"][0].replace("/data", str(tmp_path)).replace("'* -::*'", "127.0.0.1")
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REDIS_PASSWORD": password}
    process = subprocess.Popen(
        [*container["command"], script.replace("--port 6379", f"--port {port}")],
        env=env, stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        retry = Retry(ConstantBackoff(0.05), 400)
        with redis.Redis(
            port=port, password=password, retry=retry, retry_on_error=[redis.ConnectionError]
        ) as client:
            assert client.ping()
        with redis.Redis(port=port, password=password + "x", retry=Retry(NoBackoff(), 0)) as other:
            with pytest.raises(redis.AuthenticationError):
                other.ping()
    finally:
        os.killpg(process.pid, 9)
        process.wait()
