"""Redis URLs with all that a client needs: place, user, password, certificates; and how to print them.

Knows nothing of connections. redis-py reads ``ssl_…`` options from the query of a ``rediss://`` URL.
"""

from __future__ import annotations

from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from redis.connection import parse_url

from baton.protos.errors import ConfigError


def require_form(url: str) -> str:
    """Returns ``url``, which may be "". Raises ConfigError if it is not a Redis URL."""
    try:
        if url:
            parse_url(url)
    except ValueError as error:
        raise ConfigError(
            f"redis.url {masked(url)} is no Redis URL ({error}): write redis://HOST:6379, rediss://HOST:6379 or "
            "unix:///PATH",
            "redis.url",
        ) from None
    return url


def with_credentials(url: str, username: str, password: str, ca: str, cert: str, key: str) -> str:
    """Returns ``url`` with user, password and the paths of TLS files ("" each for none) put in.

    Raises ConfigError for a bad URL, or settings that don't go together.
    """
    require_form(url)
    files = {"ssl_ca_certs": ca, "ssl_certfile": cert, "ssl_keyfile": key}
    if not (username or password or any(files.values())):
        return url
    if not url:
        raise ConfigError("credentials for Redis without a Redis: set redis.url", "redis.url")
    parts = urlsplit(url)
    if any(files.values()) and parts.scheme != "rediss":
        raise ConfigError(
            f"redis.ca, redis.cert and redis.key are for TLS, and {masked(url)} is not: begin redis.url with rediss://",
            "redis.url",
        )
    if bool(cert) != bool(key):
        raise ConfigError("redis.cert and redis.key belong together", "redis.cert" if key else "redis.key")
    place = parts.netloc
    if username or password:
        place = f"{quote(username, safe='')}:{quote(password, safe='')}@{place.rpartition('@')[2]}"
    query = dict(parse_qsl(parts.query)) | {option: path for option, path in files.items() if path}
    return urlunsplit(parts._replace(netloc=place, query=urlencode(query)))


def masked(url: str) -> str:
    """Returns ``url`` with its password masked, for messages and logs."""
    parts = urlsplit(url)
    if parts.password is None and "password=" not in parts.query:
        return url
    user = parts.netloc.rpartition("@")[0].partition(":")[0]
    place = f"{user}:…@{parts.netloc.rpartition('@')[2]}" if parts.password is not None else parts.netloc
    query = urlencode([(k, "…" if k == "password" else v) for k, v in parse_qsl(parts.query)])
    return urlunsplit(parts._replace(netloc=place, query=query))
