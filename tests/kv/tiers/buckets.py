"""A real server that speaks S3's protocol, on a free port of the loopback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def served_bucket(name: str) -> Iterator[str]:
    """Serves a bucket of that name; yields the server's URL. Processes that are started meanwhile have its keys."""
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    try:
        with pytest.MonkeyPatch.context() as patch:
            for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
                patch.setenv(key, "us-east-1")
            boto3.client("s3", endpoint_url=url).create_bucket(Bucket=name)
            yield url
    finally:
        server.stop()
