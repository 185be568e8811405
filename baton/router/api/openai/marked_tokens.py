"""Finds how many tokens of a prompt lie before a client's breakpoints of the cache.

Knows nothing of workers or pages. A breakpoint is a hint: where it can't be placed it counts as one behind the
whole prompt.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from baton.protos.errors import InvalidRequest
from baton.router.api.large import offload_if
from baton.router.api.openai.breakpoints import HOUR, MINUTES, Breakpoint, breakpoints_of
from baton.router.api.openai.schemas import ChatBody
from baton.router.request.context import MarkedTokens
from baton.router.text.model import TextModel


async def marked_tokens(
    text: TextModel, body: ChatBody, rendered: str, prompt: Sequence[int], is_large: bool
) -> MarkedTokens:
    """Returns how many tokens of ``prompt``, which is ``rendered`` tokenized, lie before the breakpoints in
    ``body``.

    A conversation that ends at a breakpoint begins as the whole one does, so it is rendered and tokenized, in a
    thread if ``is_large``, and counted as far as both are alike.
    """
    found = dict.fromkeys((HOUR, MINUTES), 0)
    for point in breakpoints_of(message.marks for message in body.messages):
        found[point.ttl] = len(prompt)
        if not _is_last(body, point):
            before = await offload_if(is_large, _before, text, body, rendered, point)
            if before is not None:
                ids = await text.encode(before, add_special_tokens=bool(body.add_special_tokens))
                found[point.ttl] = _alike(tuple(ids), tuple(prompt))
    return MarkedTokens(found[HOUR], found[MINUTES])


def _is_last(body: ChatBody, point: Breakpoint) -> bool:
    """Returns whether ``point`` stands behind all that the conversation says."""
    last = len(body.messages) - 1
    return point.message == last and body.messages[last].before(point.chars) is body.messages[last]


def _before(text: TextModel, body: ChatBody, rendered: str, point: Breakpoint) -> str | None:
    """Returns the beginning of ``rendered`` before ``point``; None if the template refuses such a conversation."""
    cut = body.messages[point.message].before(point.chars)
    try:
        alone = body.render(text, [*body.messages[: point.message], cut])
    except InvalidRequest:
        return None
    return rendered[: _alike(alone, rendered)]


def _alike(one: Sequence[object], other: Sequence[object]) -> int:
    """Returns the number of leading elements in which both, of one type, are alike; whole slices are compared,
    which takes microseconds where a loop takes milliseconds.
    """
    most = min(len(one), len(other))
    return bisect_left(range(1, most + 1), True, key=lambda end: one[:end] != other[:end])
