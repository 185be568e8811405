"""A command's call of a router: answers as they are, refusals as the errors that they stand for."""

import json
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from baton.cluster.config import load_config
from baton.console.cluster.asking import RouterEndpoint, router, url_of
from baton.protos.errors import (
    BatonError,
    ConfigError,
    Forbidden,
    InvalidRequest,
    RequestUnknown,
    Unauthenticated,
    Unavailable,
)
from baton.tls.authority import Authority


class Answers(BaseHTTPRequestHandler):
    """``/STATUS`` answers with it, ``/echo`` with what it was asked, ``/broken`` with what is no JSON, ``/raw``
    with what is no HTTP/1.1.
    """

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == "/echo":
            self._send(200, {"method": self.command, "key": self.headers["authorization"], "body": body.decode()})
        elif self.path == "/raw":
            self.wfile.write(b"\0\0\x0c\x04\0\0\0\0\0\0\r\n")  # as a gRPC port does
        elif self.path == "/broken":
            self._send(502, None)
        else:
            self._send(int(self.path[1:]), {"error": {"message": f"said {self.path[1:]}"}})

    do_GET = do_POST

    def _send(self, status: int, found: object) -> None:
        data = b"<html>" if found is None else json.dumps(found).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Drops the log line."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def test_a_port_that_speaks_something_else_is_named(url: str) -> None:
    with pytest.raises(ConfigError, match=f"what answers at {url} speaks no HTTP/1.1; pass --url"):
        RouterEndpoint(url).call("GET", "/raw")


def test_a_router_whose_ca_is_not_known_is_told_from_one_that_is_not_there(tmp_path: Path) -> None:
    Authority(tmp_path, "baton.internal").make(roles=("router",))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "router.crt", tmp_path / "router.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        serving = threading.Thread(target=server.handle_request)
        serving.start()
        with pytest.raises(ConfigError, match=r"isn't trusted \(.*SSL_CERT_FILE=certs/ca.crt"):
            RouterEndpoint(f"https://127.0.0.1:{server.server_port}").call("GET", "/echo")
        serving.join()


def test_method_key_and_body_arrive(url: str) -> None:
    assert router(url, "k").call("POST", "/echo", {"a": 1}) == {
        "method": "POST",
        "key": "Bearer k",
        "body": '{"a": 1}',
    }
    assert router(f"{url}/", "").call("GET", "/echo") == {"method": "GET", "key": None, "body": ""}


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, InvalidRequest), (401, Unauthenticated), (403, Forbidden), (404, RequestUnknown), (409, InvalidRequest),
     (503, Unavailable)],
)  # fmt: skip
def test_a_refusal_is_the_error_it_stands_for(url: str, status: int, kind: type[BatonError]) -> None:
    with pytest.raises(BatonError, match=f"said {status}") as refused:
        RouterEndpoint(url).call("GET", f"/{status}")
    assert type(refused.value) is kind


def test_who_gave_no_key_hears_how_a_command_takes_it(url: str) -> None:
    with pytest.raises(Unauthenticated, match="BATON_API_KEY in the environment, most by --key"):
        RouterEndpoint(url).call("GET", "/401")


def test_an_answer_that_is_no_json_is_told_by_its_status(url: str) -> None:
    with pytest.raises(Unavailable, match="HTTP 502"):
        RouterEndpoint(url).call("GET", "/broken")


def test_nobody_there_and_no_url_at_all_say_which_option_mends_it() -> None:
    for wrong in ("http://127.0.0.1:9", "no-url"):
        with pytest.raises(ConfigError, match="pass --url"):
            RouterEndpoint(wrong).call("GET", "/echo")


def test_a_router_that_listens_everywhere_is_asked_on_this_machine() -> None:
    flags = {"router": {"host": "0.0.0.0", "port": 81, "insecure": True}}
    assert url_of(load_config(flags=flags)) == "http://127.0.0.1:81"
