"""Ids of LoRA adapters inside a cluster: NAME@DIGEST, the name with a digest of the content.

Clients say NAME. A replaced adapter has another digest, so it is another id, and its KV never meets its
predecessor's: the id is part of the chain root of block hashes (kv/layout/prefix.py). Knows nothing of files.
"""

from __future__ import annotations

import re
from zlib import crc32

from baton.protos.errors import AdapterRefused

DIGEST_DIGITS = 16  # hex digits of the SHA-256 of an adapter's content, because 64 bits tell any library's apart
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ID = re.compile(rf"({_NAME.pattern})@([0-9a-f]{{{DIGEST_DIGITS}}})")


def adapter_id(name: str, digest: str) -> str:
    """Returns the id NAME@DIGEST; of ``digest``, hex, the first DIGEST_DIGITS digits count."""
    return f"{name}@{digest[:DIGEST_DIGITS]}"


def name_of(adapter: str) -> str:
    """Returns the name in an adapter id; all of ``adapter`` if it has no digest."""
    return adapter.partition("@")[0]


def digest_of(adapter: str) -> str:
    """Returns the digest in an adapter id; "" if it has none."""
    return adapter.partition("@")[2]


def number_of(adapter: str) -> int:
    """Returns a number above 0 and at most 2^32 that stands for an adapter id, the same in every process; 0 for no
    adapter. Two ids share a number with a chance of 2^-32.
    """
    return 1 + crc32(adapter.encode()) if adapter else 0


def is_adapter_id(text: str) -> bool:
    """Returns whether ``text`` is a well-formed NAME@DIGEST."""
    return _ID.fullmatch(text) is not None


def is_digest(text: str) -> bool:
    """Returns whether ``text`` is DIGEST_DIGITS hex digits, as in adapter ids."""
    return re.fullmatch(rf"[0-9a-f]{{{DIGEST_DIGITS}}}", text) is not None


def require_name(name: str, param: str = "lora_name") -> str:
    """Returns ``name`` if it is a valid adapter name. Raises AdapterRefused naming ``param``."""
    if _NAME.fullmatch(name) is None:
        text = "1 to 64 letters, digits, dots, underscores and dashes, a letter or a digit first"
        raise AdapterRefused(f"adapter name {name!r}: use {text}", param)
    return name
