"""Names an adapter by its content: NAME@DIGEST, which is what travels inside a cluster.

Clients say NAME. A replaced adapter has another digest, so it is another id, and its KV never meets its
predecessor's: the id is part of the chain root of block hashes (kv/layout/prefix.py). Knows nothing of files.
"""

from __future__ import annotations

import re

from baton.protos.errors import AdapterRefused

DIGEST_DIGITS = 16  # hex digits of the SHA-256 of an adapter's content, because 64 bits tell any library's apart
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(rf"({_NAME.pattern})@([0-9a-f]{{{DIGEST_DIGITS}}})")


def adapter_id(name: str, digest: str) -> str:
    """Returns the id of the adapter ``name`` whose content has ``digest`` (hex, 16 digits or more count as 16)."""
    return f"{name}@{digest[:DIGEST_DIGITS]}"


def name_of(adapter: str) -> str:
    """Returns the name in an id; of what has no digest, all of it."""
    return adapter.partition("@")[0]


def digest_of(adapter: str) -> str:
    """Returns the digest in an id; empty where it has none."""
    return adapter.partition("@")[2]


def is_adapter_id(text: str) -> bool:
    """Tells whether ``text`` is NAME@DIGEST."""
    return _ID.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Tells whether ``text`` is a digest as ids have it."""
    return re.fullmatch(rf"[0-9a-f]{{{DIGEST_DIGITS}}}", text) is not None


def require_name(name: str, param: str = "lora_name") -> str:
    """Returns ``name`` where an adapter may have it. Raises AdapterRefused naming ``param``."""
    if _NAME.fullmatch(name) is None:
        text = "1 to 64 letters, digits, dots, underscores and dashes, a letter or a digit first"
        raise AdapterRefused(f"adapter name {name!r}: use {text}", param)
    return name
