"""Stores blobs in a bucket of any store with the S3 protocol. Knows nothing of their contents.

boto3 implements the protocol and finds credentials as usual (environment, files, roles). Its errors become OSError.
The time of a blob's last use is that of its last write: the protocol has no other.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from baton.kv.tiers.blobs import Entry
from baton.protos.errors import ConfigError

if TYPE_CHECKING:
    from botocore.client import BaseClient

T = TypeVar("T")
SETTING = "worker.shared_tier"
CONNECT_S, READ_S = 2.0, 5.0  # seconds, because a store that takes longer costs more than computing the block
ABSENT = ("404", "NoSuchKey", "NotFound")


class BucketStore:
    """Stores blobs in the bucket of ``url``, s3://BUCKET/PREFIX, at ``endpoint`` (empty: Amazon's).

    Raises ConfigError if boto3 isn't installed or rejects the endpoint.
    """

    def __init__(self, url: str, endpoint: str = "") -> None:
        parts = urlsplit(url)
        self._bucket, prefix = parts.netloc, parts.path.strip("/")
        self._prefix = f"{prefix}/" if prefix else ""
        self._client, self._errors = _connected(endpoint)

    def get(self, name: str, most: int) -> bytes | None:
        """Returns the first ``most`` bytes of a blob, None if there is none of that name. Raises OSError."""
        return self._asked(lambda: self._body(name, most), None)

    def has(self, name: str) -> bool:
        """Returns whether there is a blob of that name. Raises OSError."""
        return self._asked(lambda: bool(self._client.head_object(**self._at(name))), False)

    def put(self, name: str, blob: bytes) -> None:
        """Stores a blob, whole or not at all. Raises OSError."""
        self._asked(lambda: self._client.put_object(**self._at(name), Body=blob), None)

    def remove(self, name: str) -> None:
        """Removes a blob; does nothing if there is none of that name. Raises OSError."""
        self._asked(lambda: self._client.delete_object(**self._at(name)), None)

    def entries(self) -> Iterator[Entry]:
        """Yields all objects under the prefix. Raises OSError."""
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=self._prefix)
        pages = iter(pages)
        while (page := self._asked(lambda: next(pages, None), None)) is not None:
            yield from map(self._entry, page.get("Contents", ()))

    def _entry(self, listed: Mapping[str, Any]) -> Entry:
        try:
            name, size, written = listed["Key"], listed["Size"], listed["LastModified"]
        except KeyError as missing:
            raise OSError(errno.EIO, f"the bucket lists an object without its {missing}") from None
        return Entry(name.removeprefix(self._prefix), size, written.timestamp())

    def _body(self, name: str, most: int) -> bytes:
        with self._client.get_object(**self._at(name))["Body"] as body:
            return bytes(body.read(most))

    def _at(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    def _asked(self, ask: Callable[[], T], absent: T) -> T:
        """Returns the result of ``ask``, or ``absent`` if the store has no such blob."""
        try:
            return ask()
        except self._errors as error:
            response = getattr(error, "response", None) or {}  # None where no answer came
            if response.get("Error", {}).get("Code") in ABSENT and "Bucket" not in str(error):
                return absent
            raise OSError(errno.EIO, f"the bucket can't be reached: {error}") from None


def _connected(endpoint: str) -> tuple[BaseClient, tuple[type[Exception], ...]]:
    """Returns an S3 client and the exceptions that its calls raise."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError
    except ImportError:
        text = "worker.shared_tier is a bucket, which needs boto3: pip install 'baton-serve[s3]'"
        raise ConfigError(text, SETTING) from None
    limits = Config(connect_timeout=CONNECT_S, read_timeout=READ_S, retries={"max_attempts": 1})
    try:
        client = boto3.client("s3", endpoint_url=endpoint or None, config=limits)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"the bucket's client can't be made: {error}", SETTING) from None
    return client, (BotoCoreError, ClientError)
