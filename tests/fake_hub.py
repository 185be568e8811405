"""A server that speaks as much of the Hugging Face hub's protocol as a download of a repository takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def hub(repositories: dict[str, Path]) -> Iterator[str]:
    """Serves folders by their ids, such as "acme/sql", on loopback; the context's value is the endpoint's URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, with_body: bool) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            asks = parts[:2] == ["api", "models"]
            found = _told(repositories, parts[2:]) if asks else _file(repositories, parts)
            self.send_response(404 if found is None else 200)
            body = found or b""
            if found is None:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _told(repositories: dict[str, Path], parts: list[str]) -> bytes | None:
    """The answer to ORG/NAME/revision/REVISION, or to ORG/NAME/tree/REVISION: the files alone."""
    folder = repositories.get("/".join(parts[:2]))
    if folder is None:
        return None
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path: path.relative_to(folder).as_posix() for path in files}
    if parts[2:3] == ["tree"]:
        tree = [{"type": "file", "oid": COMMIT, "size": path.stat().st_size, "path": names[path]} for path in files]
        return json.dumps(tree).encode()
    siblings = [{"rfilename": names[path]} for path in files]
    return json.dumps({"id": "/".join(parts[:2]), "sha": COMMIT, "siblings": siblings}).encode()


def _file(repositories: dict[str, Path], parts: list[str]) -> bytes | None:
    """The bytes of ORG/NAME/resolve/REVISION/FILE."""
    folder = repositories.get("/".join(parts[:2]))
    path = None if folder is None or len(parts) < 5 else folder.joinpath(*parts[4:])
    return path.read_bytes() if path is not None and path.is_file() else None
