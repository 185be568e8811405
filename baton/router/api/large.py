"""Keeps large JSON off the event loop: bodies are weighed before they are parsed, answers are written in slices.

Knows nothing of what a body means. A parser holds the GIL throughout, so a thread alone would still block the loop.
Weighing uses numpy, which releases the GIL; bodies with too many values are refused before they are parsed; long
lists of token ids are cut out and read slice by slice; a long answer's parts are written one after the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec
import numpy as np
import orjson
from pydantic_core import from_json
from starlette.responses import Response

from baton.protos.errors import InvalidRequest
from baton.router.api.body import B, parse_body

INLINE_BYTES = 16 << 10  # parsed on the loop: under 5 ms whatever is in it
# Strings, objects and arrays of one body: the costliest forms take some 1.5 us each, so 40 ms.
MAX_VALUES = 24_576
MAX_NUMBERS = 131_072  # outside of long lists of ids; 0.15 us each
LONG_LIST = 16 << 10  # bytes between brackets from which a list of numbers is read in slices
SLICE_BYTES = 64 << 10  # bytes of JSON that are parsed at once, so that others are served in between
SLICE_ITEMS = 1024  # items of a list that are written at once, so that others are served in between
MARK = -(2**62)  # stands for a list that was cut out; no token's id
QUOTE, COMMA, OPEN, CLOSE = 0x22, 0x2C, 0x5B, 0x5D  # bytes of JSON's characters ", comma, [ and ]
_STRUCTURE = np.zeros(256, bool)
_STRUCTURE[[QUOTE, OPEN, CLOSE, 0x7B, 0x7D]] = True
_T = TypeVar("_T")
_threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="large")


class JsonCounts(msgspec.Struct, frozen=True):
    """Counts what a JSON text is made of.

    ``values``: strings, objects and arrays; ``numbers``: commas outside of strings. ``lists``: (begin, end) byte
    offsets of the insides of long flat lists.
    """

    values: int
    numbers: int
    lists: tuple[tuple[int, int], ...] = ()


async def offload_if(is_large: bool, work: Callable[..., _T], *args: object) -> _T:
    """Returns ``work(*args)``, run in a thread if ``is_large``, as ``offloaded`` does."""
    return await offloaded(work, *args) if is_large else work(*args)


async def offloaded(work: Callable[..., _T], *args: object) -> _T:
    """Returns ``work(*args)``, run in a thread. ``work`` should release the GIL now and then."""
    return await asyncio.get_running_loop().run_in_executor(_threads, partial(work, *args))


async def parsed(kind: type[B], raw: bytes) -> B:
    """Parses a body as ``parse_body`` does, in a thread if it is over INLINE_BYTES.

    Raises InvalidRequest, also for a large body of too many values.
    """
    return await offload_if(len(raw) > INLINE_BYTES, _parsed if len(raw) > INLINE_BYTES else parse_body, kind, raw)


def require_light(text: str | bytes, param: str) -> None:
    """Raises InvalidRequest, naming ``param``, if JSON text nested in a body or file has too many values to parse.

    Texts up to INLINE_BYTES always pass.
    """
    if len(text) > INLINE_BYTES:
        _require(count_json_values(text.encode(errors="replace") if isinstance(text, str) else text), 0, param)


def require_light_together(texts: Sequence[str], param: str) -> None:
    """Raises InvalidRequest, naming ``param``, if JSON texts nested in a body have too many values in all.

    Texts up to INLINE_BYTES in all pass.
    """
    if sum(map(len, texts)) > INLINE_BYTES:
        counts = [count_json_values(text.encode(errors="replace")) for text in texts]
        _require(JsonCounts(sum(c.values for c in counts), sum(c.numbers for c in counts)), 0, param)


def count_json_values(raw: bytes) -> JsonCounts:
    """Returns the counts of values in JSON ``raw`` without parsing it; for invalid JSON the counts are
    arbitrary.
    """
    plain = raw.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in raw else raw
    text = np.frombuffer(plain, np.uint8)
    quotes = text == QUOTE
    outside = np.bitwise_xor.accumulate(quotes.view(np.uint8)) == 0
    marks = np.flatnonzero(_STRUCTURE[text] & (outside | quotes))
    kinds = text[marks]
    strings = int(np.count_nonzero(quotes)) // 2
    containers = int(np.count_nonzero((kinds == OPEN) | (kinds == 0x7B)))
    commas = int(np.count_nonzero((text == COMMA) & outside))
    flat = (kinds[:-1] == OPEN) & (kinds[1:] == CLOSE) & (np.diff(marks) > LONG_LIST)
    found = tuple((int(marks[i]) + 1, int(marks[i + 1])) for i in np.flatnonzero(flat))
    return JsonCounts(strings + containers, commas, found)


def _parsed(kind: type[B], raw: bytes) -> B:
    weight = count_json_values(raw)
    fields = kind.id_lists
    spans = weight.lists if fields else ()
    commas = sum(raw.count(b",", low, high) for low, high in spans)
    _require(weight, commas, "")
    if not spans:
        return parse_body(kind, raw)
    body = parse_body(kind, _without(raw, spans))
    _put_back(body, fields, {MARK - i: raw[low:high] for i, (low, high) in enumerate(spans)})
    return body


def _require(weight: JsonCounts, apart: int, param: str) -> None:
    """``apart`` numbers are read apart."""
    if weight.values > MAX_VALUES or weight.numbers - apart > MAX_NUMBERS + MAX_VALUES:
        raise InvalidRequest(
            f"{param or 'the body'} has {weight.values} strings, objects and arrays and {weight.numbers} commas: "
            f"at most {MAX_VALUES} and {MAX_NUMBERS} are read; send fewer, longer ones",
            param,
        )


def _without(raw: bytes, spans: tuple[tuple[int, int], ...]) -> bytes:
    parts, at = [], 0
    for i, (low, high) in enumerate(spans):
        parts += [raw[at:low], str(MARK - i).encode()]
        at = high
    return b"".join((*parts, raw[at:]))


def _put_back(body: object, fields: tuple[str, ...], lists: dict[int, bytes]) -> None:
    """Replaces the mark of each list by the list: as a field's value, or one of the field's values."""
    for field in fields:
        value = getattr(body, field)
        if isinstance(value, list):
            setattr(body, field, [_ids_of(item, lists, field) for item in value])
            whole = _ids_of(value, lists, field)
            if whole is not value:
                setattr(body, field, whole)
    if lists:
        only = " or ".join(fields)
        raise InvalidRequest(f"a list of over {LONG_LIST} bytes of numbers: only {only} may be so long")


def _ids_of(item: object, lists: dict[int, bytes], param: str) -> object:
    if isinstance(item, list) and len(item) == 1 and isinstance(item[0], int) and item[0] in lists:
        return read_ids(lists.pop(item[0]), param)
    return item


def read_ids(text: bytes, param: str) -> list[int]:
    """Parses the inside of a JSON list of integers, slice by slice. Raises InvalidRequest naming ``param``."""
    ids: list[int] = []
    for part in _parts(text):
        try:
            some = from_json(b"[" + part + b"]")
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}", param) from None
        if set(map(type, some)) != {int}:
            raise InvalidRequest(f"{param}: should hold only token ids (integers)", param)
        ids += some
    return ids


def _parts(text: bytes) -> Iterator[bytes]:
    at = 0
    while at <= len(text):
        end = text.find(b",", at + SLICE_BYTES)
        end = len(text) if end < 0 else end
        yield text[at:end]
        at = end + 1


def sliced_json(content: object) -> Iterator[bytes]:
    """Yields the parts of ``content`` as JSON; lists of over SLICE_ITEMS items are split, at any depth."""
    if isinstance(content, Mapping):
        for i, (key, value) in enumerate(content.items()):
            yield (b"," if i else b"{") + orjson.dumps(key) + b":"
            yield from sliced_json(value)
        yield b"}" if content else b"{}"
    elif isinstance(content, list | tuple) and len(content) > SLICE_ITEMS and not isinstance(content[0], list):
        for at in range(0, len(content), SLICE_ITEMS):
            yield (b"," if at else b"[") + orjson.dumps(content[at : at + SLICE_ITEMS])[1:-1]
        yield b"]"
    elif isinstance(content, list | tuple) and content and isinstance(content[0], Mapping | list | tuple):
        for i, item in enumerate(content):
            yield b"," if i else b"["
            yield from sliced_json(item)
        yield b"]"
    else:
        yield orjson.dumps(content)


async def large_response(content: object, headers: dict[str, str] | None = None, is_large: bool = True) -> Response:
    """Returns a response with ``content`` as JSON, encoded in a thread if ``is_large``."""
    body = await offload_if(is_large, _written if is_large else orjson.dumps, content)
    return Response(body, headers=headers, media_type="application/json")


def _written(content: object) -> bytes:
    return b"".join(sliced_json(content))
