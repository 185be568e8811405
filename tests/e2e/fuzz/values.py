"""Odd JSON values, values shaped by a schema, and damage to bytes. All of it follows from the ``Random``."""

from __future__ import annotations

import json
import random
from typing import Any

TEXTS = [
    "", "x", "é", "\x00", "日本" * 50, "a" * 3000, '{"type": "object"}', "(", "[a-z]+", "<tool_call>", "</think>",
    "\ud83d", "\u202e", "🦊" * 99, "../../etc/passwd", "%s%n", "nan", "-1", "\r\n\r\n", "ſ", "a\u0300" * 200,
]  # fmt: skip
NUMBERS = [
    0, 1, -1, 2, 7, 16, 21, 255, 256, 400, 2**31 - 1, 2**31, 2**32, -(2**63), 2**63, 2**64, 10**30, 0.5, -0.0,
    1e308, 2.5, 1e-320, float("nan"), float("inf"), float("-inf"),
]  # fmt: skip
KEYS = ["type", "role", "content", "function", "name", "schema", "text", "properties", "5", "", "\x00", "$ref"]
# What a document may be that no schema describes: deep, endless, doubled, in another encoding, or nearly JSON.
DOCUMENTS = [
    b"[" * 50_000, b'{"a":' * 20_000, b"[" * 5000 + b"]" * 5000, b'{"prompt": ' + b"9" * 20_000 + b"}",
    b'{"prompt": "x", "max_tokens": 1e999999}', b'{"prompt": "x", "prompt": ["x"]}', b"\xef\xbb\xbf{}",
    b"\xff\xfe{\x00",
    '{"prompt": "x"}'.encode("utf-16"), b'{"prompt": "\xc3\x28"}', b'{"prompt": "\\ud83d"}', b'{"prompt": "x"} {}',
    b'{"prompt": NaN}', b"", b"null", b"0", b'"x"', b"[]", b"{}", b"\x00" * 100, b"{'prompt': 'x'}",
    b'{"prompt": "x",}',
    b'{"messages": [' + b'{"role":"user","content":"x"},' * 3000 + b'{"role":"user","content":"x"}]}',
    b'{"prompt": "' + b"a" * 60_000 + b'"}', b'{"prompt": [' + b"1," * 30_000 + b"1]}",
]  # fmt: skip


def junk(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON value, odd ones more often."""
    kind = rng.randrange(6 if depth < 3 else 4)
    if kind == 0:
        return rng.choice([None, True, False])
    if kind == 1:
        return rng.choice(NUMBERS)
    if kind in (2, 3):
        return rng.choice(TEXTS)
    if kind == 4:
        return [junk(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(KEYS): junk(rng, depth + 1) for _ in range(rng.randrange(4))}


def shaped(rng: random.Random, schema: Any, schemas: dict[str, Any], depth: int = 0) -> Any:
    """A value of ``schema`` or nearly one; references point into ``schemas``."""
    if not isinstance(schema, dict) or depth > 8 or rng.random() < 0.03:
        return junk(rng, 2)
    if "$ref" in schema:
        return shaped(rng, schemas.get(schema["$ref"].rpartition("/")[2]), schemas, depth + 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if key in schema:
            return shaped(rng, rng.choice(schema[key]), schemas, depth + 1)
    if "enum" in schema or "const" in schema:
        return rng.choice(schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    kind = rng.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        return _object(rng, schema, schemas, depth)
    if kind == "array":
        return [shaped(rng, schema.get("items"), schemas, depth + 1) for _ in range(rng.randrange(4))]
    return _scalar(rng, kind)


def _object(rng: random.Random, schema: Any, schemas: dict[str, Any], depth: int) -> Any:
    required, found = schema.get("required", ()), {}
    for name, of in schema.get("properties", {}).items():
        if name in required or rng.random() < (0.15 if depth < 3 else 0.05):
            found[name] = shaped(rng, of, schemas, depth + 1)
    if isinstance(schema.get("additionalProperties"), dict) and rng.random() < 0.5:
        found[rng.choice(KEYS)] = shaped(rng, schema["additionalProperties"], schemas, depth + 1)
    return found


def _scalar(rng: random.Random, kind: str | None) -> Any:
    if kind == "string":
        return rng.choice(TEXTS) if rng.random() < 0.5 else "".join(chr(rng.randrange(32, 127)) for _ in range(9))
    if kind == "integer":
        return rng.choice([0, 1, 2, 3, 5, 16, 100]) if rng.random() < 0.8 else rng.choice(NUMBERS)
    if kind == "number":
        return rng.random() if rng.random() < 0.8 else rng.choice(NUMBERS)
    if kind == "boolean":
        return rng.random() < 0.5
    return None if kind == "null" else junk(rng, 2)


def encoded(rng: random.Random, value: Any) -> bytes:
    """Returns ``value`` as JSON, with or without escapes; lone surrogates are replaced."""
    return json.dumps(value, ensure_ascii=rng.random() < 0.7).encode(errors="replace")


def damaged(rng: random.Random, raw: bytes) -> bytes:
    """Some bytes changed, left out, doubled or cut."""
    out = bytearray(raw or b"\x00")
    for _ in range(rng.choice([1, 1, 2, 8])):
        at = rng.randrange(len(out))
        kind = rng.randrange(4)
        if kind == 0:
            out[at] = rng.randrange(256)
        elif kind == 1 and len(out) > 1:
            del out[at : at + rng.choice([1, 1, 40])]
        elif kind == 2:
            out[at:at] = out[at : at + 16]
        else:
            del out[max(1, at) :]
        out = out or bytearray(b"\x00")
    return bytes(out)
